"""The command `mttrain`, and the one place that prints errors and chooses the exit status.

stdout carries results only; messages, warnings and progress go to stderr; both are UTF-8 whatever
the locale, and so are the names of files: where the locale has another encoding, the command starts
again in Python's UTF-8 mode. Exit status: 0 done, 2 usage or configuration, 3 data, 4 checkpoint,
5 training diverged, 130 after SIGINT, 143 after SIGTERM, 1 for our own mistakes. A closed pipe
(`| head -1`) ends a command quietly with status 0, always: whether the reader left before or after
the last line is chance, and its own status says how it fared.

Price: `mttrain --help` takes 0.1 s, because torch, pydantic and the rest of the package are
imported by the commands that need them, when they run.
"""

from __future__ import annotations

import bisect
import contextlib
import itertools
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from enum import StrEnum
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any

import typer
import typer.main

import mttrain
from mttrain import cli_decode
from mttrain.cli_checks import (
    extra_argument_hint,
    refuse_overwriting,
    refuse_replacing_text,
    say,
    tell_waiting,
)
from mttrain.cli_decode import Debug, Input, Number, Output, Words, opt
from mttrain.errors import CheckpointError, ConfigError, DataError, MttrainError

if TYPE_CHECKING:
    from mttrain.config import RunConfig
    from mttrain.tokenizer import Tokenizer

# Every typer has it, but not always under a public name: the base of all wrong-usage errors.
_UsageError: type[Any] = typer.BadParameter.__bases__[0]

ConfigFile = Annotated[str | None, opt("--config", "YAML", "Configuration of the run.")]
Settings = Annotated[Words, opt("--set", "SECTION.KEY=VALUE", "Override a setting; repeatable.")]
Level = StrEnum("Level", ["subword", "character"])
Side = StrEnum("Side", ["source", "target"])

app = typer.Typer(
    add_completion=False,
    rich_markup_mode=None,  # plain help: rich alone would double the time of --help
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


# ---- running ----------------------------------------------------------------------------------


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line (default: that of the process) and return its exit status."""
    if argv is None:
        _start_again_in_utf8_mode()
    args = list(sys.argv[1:] if argv is None else argv)
    _keep_descriptors()
    _use_utf8()
    try:
        with _sigterm_raises():
            command = typer.main.get_command(app)
            with command.make_context("mttrain", args) as context:
                command.invoke(context)
            if sys.stdout is not None:
                sys.stdout.flush()
        return 0
    except typer.Exit as end:
        return end.exit_code
    except BaseException as error:
        return _failed(error, args)


def _start_again_in_utf8_mode() -> None:
    """Where the locale has another encoding, go on as a process in Python's UTF-8 mode.

    The mode decides which bytes the name of a file becomes, and a running interpreter keeps it.
    """
    ours = os.path.basename(sys.argv[0]) in ("mttrain", "__main__.py")
    if ours and sys.executable and sys.getfilesystemencoding() != "utf-8":
        with contextlib.suppress(OSError):
            os.execv(sys.executable, [sys.executable, "-X", "utf8", *sys.orig_argv[1:]])


def _keep_descriptors() -> None:
    """Take the places of closed standard streams, or the next file that is opened gets one, and
    what a library prints goes into that file."""
    with contextlib.suppress(OSError):
        while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
            pass
        os.close(descriptor)


def _use_utf8() -> None:
    """Text is UTF-8 even where the locale says otherwise; a message never fails to be printed."""
    for stream, errors in ((sys.stdout, "strict"), (sys.stderr, "backslashreplace")):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(encoding="utf-8", errors=errors)


class _Terminated(BaseException):
    """SIGTERM, raised like KeyboardInterrupt, so that unfinished files are removed."""


@contextlib.contextmanager
def _sigterm_raises() -> Iterator[None]:
    """Turn SIGTERM into an exception, unless somebody else handles it already."""

    def handle(number: int, frame: FrameType | None) -> None:
        raise _Terminated

    ours = (
        threading.current_thread() is threading.main_thread()
        and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    )
    if ours:
        signal.signal(signal.SIGTERM, handle)
    try:
        yield
    finally:
        if ours:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _failed(error: BaseException, args: list[str]) -> int:
    """Print what went wrong and return the exit status."""
    command = next((arg for arg in args if not arg.startswith("-")), "")
    if isinstance(error, BrokenPipeError) and command != "train":
        # What is still buffered must not fail again when the interpreter flushes it at exit.
        with contextlib.suppress(OSError, ValueError, AttributeError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    if "--debug" in args and sys.stderr is not None and not isinstance(error, SystemExit):
        with contextlib.suppress(OSError):
            traceback.print_exception(error)
    status, lines = _explain(error, args)
    for line in lines:
        say(line)
    return status


def _explain(error: BaseException, args: Sequence[str]) -> tuple[int, list[str]]:
    """Exit status and the lines to print."""
    if isinstance(error, _UsageError):
        context = getattr(error, "ctx", None)
        command = context.command_path if context else "mttrain"
        message = " ".join(error.format_message().split())
        hint = extra_argument_hint(message, command.split()[-1], args)
        return 2, [f"error: {message}", hint or f"Try '{command} --help'."]
    if isinstance(error, MttrainError):
        return error.exit_code, [f"error: {line}" for line in str(error).split("\n")]
    if isinstance(error, KeyboardInterrupt):
        return 128 + signal.SIGINT, ["interrupted"]
    if isinstance(error, _Terminated):
        return 128 + signal.SIGTERM, ["terminated"]
    if isinstance(error, SystemExit):
        return error.code if isinstance(error.code, int) else int(error.code is not None), []
    if isinstance(error, OSError) and error.strerror:
        name = f"{error.filename}: " if error.filename else ""
        return 3, [f"error: {name}{error.strerror}"]
    if _out_of_memory(error):
        return 1, [
            "error: not enough memory for this; lower the sizes of the model or of the batches "
            "(train.batch_tokens, --batch-tokens)."
        ]
    text = next(iter(str(error).split("\n")), "")[:300]
    return 1, [
        f"error: {type(error).__name__}: {text}",
        "This is unexpected; the same command with --debug shows where it happened.",
    ]


def _out_of_memory(error: BaseException) -> bool:
    if "torch" not in sys.modules or not isinstance(error, Exception):
        return isinstance(error, MemoryError)
    from mttrain.machine import out_of_memory

    return out_of_memory(error)


def _version(value: bool) -> None:
    if value:
        typer.echo(f"mttrain {mttrain.__version__}")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def _top(
    context: typer.Context,
    version: Annotated[
        bool,
        typer.Option("--version", callback=_version, is_eager=True, help="Print the version."),
    ] = False,
    debug: Debug = False,
) -> None:
    """Train, run and score Transformers for machine translation."""
    if context.invoked_subcommand is None:
        typer.echo(context.get_help(), err=True)
        raise typer.Exit(2)


# ---- tokenize ---------------------------------------------------------------------------------


@app.command()
def tokenize(
    files: Annotated[Words, typer.Argument(metavar="FILES", help="Text, languages mixed.")] = None,
    source: Annotated[Words, opt("--source", "F", "Source text; repeatable.")] = None,
    target: Annotated[Words, opt("--target", "F", "Target text; repeatable.")] = None,
    config: ConfigFile = None,
    settings: Settings = None,
    vocab_size: Annotated[Number, opt("--vocab-size", "N", "Tokens to learn (6000).")] = None,
    level: Annotated[Level | None, opt("--level", None, "Largest token (subword).")] = None,
    separate: Annotated[
        bool, opt("--separate", None, "--source and --target: a vocabulary for each.")
    ] = False,
    output: Annotated[
        str, opt("--output", "F", "F.json; separate ones: F.source.json, F.target.json.")
    ] = "tokenizer.json",
    debug: Debug = False,
) -> None:
    """Learn a vocabulary from text files and print how it cuts them."""
    if settings and config is None:
        raise ConfigError("--set changes a setting of --config, which is missing.")
    sources, targets = source or [], target or []
    if files and (sources or targets):
        raise ConfigError("Give FILES (one vocabulary for all), or --source and --target.")
    if separate and config is not None:
        raise ConfigError("With --config its tokenizer.shared decides; remove --separate.")
    if separate and not (sources and targets):
        raise ConfigError("--separate needs both --source and --target.")
    wanted = None if config is None else _tokenizer_settings(config, settings or [])
    if wanted is not None and not (files or sources or targets):
        sources = [corpus.source for corpus in wanted.data.train]
        targets = [corpus.target for corpus in wanted.data.train]
    if not (files or sources or targets):
        raise ConfigError(
            "There is no text to learn from; give FILES, --source/--target, --config."
        )
    defaults = None if wanted is None else wanted.tokenizer
    size = defaults.vocab_size if defaults else 6000
    if vocab_size is not None:
        size = vocab_size
    unit = level.value if level else defaults.level if defaults else "subword"
    if not separate and (defaults is None or defaults.shared):
        _learn({Path(output): [*(files or []), *sources, *targets]}, size, unit)
        return
    if not (sources and targets):
        raise ConfigError(f"{config} says shared: false; give both --source and --target.")
    texts = {"source": sources, "target": targets}
    _learn({_side_path(Path(output), side): texts[side] for side in texts}, size, unit)


def _tokenizer_settings(config: str, settings: list[str]) -> RunConfig:
    from mttrain.config import load_config

    loaded = load_config(config, settings)
    if loaded.tokenizer.path or loaded.tokenizer.source_path:
        raise ConfigError(f"{config} names an existing tokenizer: there is nothing to learn.")
    return loaded


def _side_path(path: Path, side: str) -> Path:
    """tokenizer.json -> tokenizer.source.json"""
    return path.with_name(f"{path.stem}.{side}{path.suffix or '.json'}")


def _learn(wanted: dict[Path, list[str]], size: int, level: Any) -> None:
    """Learn a vocabulary for each path from the files named with it."""
    from mttrain.corpus import read_lines, require_writable

    for output in wanted:
        for file in itertools.chain(*wanted.values()):
            refuse_overwriting(output, {"input file": file})
        refuse_replacing_text(output)
        require_writable(output)
    # Learning and reporting both need the text, and what is no file (stdin, a pipe of the shell)
    # can be read only once.
    names = dict.fromkeys(file for files in wanted.values() for file in files)
    pipes = [name for name in names if name == "-" or not os.path.isfile(name)]
    kept = {name: list(read_lines(name)) for name in pipes}
    for output, files in wanted.items():
        _learn_one(files, kept, size, level, output)


def _learn_one(
    files: list[str], kept: dict[str, list[str]], size: int, level: Any, output: Path
) -> None:
    """Learn, save, and print the report on the text learned from."""
    from mttrain.corpus import path_name, read_lines, write_lines
    from mttrain.tokenizer import tokenizer_report, train_tokenizer

    ends: list[int] = []  # for each file the number of its last line, counted through all

    def lines() -> Iterator[str]:
        ends.clear()
        count = 0
        for file in files:
            for line in kept[file] if file in kept else read_lines(file):
                count += 1
                yield line
            ends.append(count)

    tokenizer = train_tokenizer(lines(), vocab_size=size, level=level)
    tokenizer.save(output)
    if tokenizer.size < size:
        say(f"The text gives {tokenizer.size} tokens, not {size}: no more pairs occur twice.")
    report = tokenizer_report(tokenizer, lines())
    at = bisect.bisect_left(ends, report.longest_line)
    number = report.longest_line - (ends[at - 1] if at else 0)
    table = report.text(f"{path_name(files[at])}, line {number}").split("\n")
    write_lines(None, [f"{output}, learned from {', '.join(map(path_name, files))}", *table])


# ---- encode -----------------------------------------------------------------------------------


@app.command()
def encode(
    model: Annotated[
        str | None, opt("--model", "RUN", "Run, checkpoint or tokenizer.json.")
    ] = None,
    side: Annotated[Side | None, opt("--side", None, "Whose vocabulary (source).")] = None,
    ids: Annotated[bool, opt("--ids", None, "Numbers instead of pieces.")] = False,
    decode: Annotated[bool, opt("--decode", None, "From pieces or --ids back to text.")] = False,
    input: Input = "-",
    output: Output = "-",
    debug: Debug = False,
) -> None:
    """Show the pieces of each line of a text."""
    if model is None:
        raise ConfigError("Name the model: --model RUN.")
    from mttrain.corpus import LineWriter, path_name, read_lines
    from mttrain.tokenizer import Tokenizer

    tokenizer = Tokenizer.load(_tokenizer_file(model, side))
    convert = _decoder(tokenizer, ids) if decode else _encoder(tokenizer, ids)
    refuse_overwriting(output, {"input file": input})
    tell_waiting(input)
    with LineWriter(output) as writer:
        for number, line in enumerate(read_lines(input), start=1):
            try:
                text = convert(line)
            except _BadToken as error:
                raise DataError(f"{path_name(input)}, line {number}: {error}") from None
            writer.write(text)
            if output == "-" and sys.stdout.isatty():
                writer.flush()


def _tokenizer_file(model: str, side: Side | None) -> Path:
    """The file itself, or that of the checkpoint which `translate` would take."""
    from mttrain.rundir import resolve_model

    if os.path.isfile(model):
        if side is not None:
            raise ConfigError(f"{model} is one vocabulary: --side has no effect; remove it.")
        return Path(model)
    folder = resolve_model(model)
    for name in ("tokenizer.json", f"tokenizer.{side or Side.source}.json"):
        if (folder / name).is_file():
            return folder / name
    raise CheckpointError(f"{folder} holds no tokenizer.json: the checkpoint is incomplete.")


class _BadToken(ValueError):
    """A word of the input of --decode is no token."""


def _encoder(tokenizer: Tokenizer, ids: bool) -> Callable[[str], str]:
    if ids:
        return lambda line: " ".join(map(str, tokenizer.encode(line)))
    return lambda line: " ".join(tokenizer.pieces(line))


def _decoder(tokenizer: Tokenizer, ids: bool) -> Callable[[str], str]:
    def number(word: str) -> int:
        index = int(word) if ids and word.isascii() and word.isdecimal() else None
        if not ids:
            index = tokenizer.piece_id(word)
        if index is None or index >= tokenizer.size:
            kind = f"token number (0 to {tokenizer.size - 1})" if ids else "piece of the vocabulary"
            raise _BadToken(f"{word[:40]!r} is no {kind}.")
        return index

    return lambda line: tokenizer.decode([number(word) for word in line.split()])


# ---- train, translate, eval -------------------------------------------------------------------


@app.command()
def train(
    config: ConfigFile = None,
    settings: Settings = None,
    fresh: Annotated[bool, opt("--fresh", None, "Remove an earlier run of that name.")] = False,
    dry_run: Annotated[
        bool, opt("--dry-run", None, "Check text and sizes, train nothing.")
    ] = False,
    debug: Debug = False,
) -> None:
    """Train a model, or resume the run whose directory exists."""
    if config is None:
        raise ConfigError("Name the configuration: --config X.yaml.")
    if fresh and dry_run:
        raise ConfigError("--dry-run trains nothing, so --fresh has no effect; remove one.")
    from mttrain.config import load_config

    loaded = load_config(config, settings or ())  # before torch: mistakes show at once
    from mttrain import trainer
    from mttrain.corpus import write_lines

    result = trainer.train(loaded, fresh=fresh, dry_run=dry_run)
    # Under torchrun one process reports. The log has the scores too: a closed stdout costs nothing.
    if os.environ.get("RANK", "0") == "0" and result.scores and sys.stdout is not None:
        write_lines(None, [score.text() for score in result.scores])
    if result.exit_code:
        raise typer.Exit(result.exit_code)


app.command("translate")(cli_decode.translate)
app.command("eval")(cli_decode.evaluate)
