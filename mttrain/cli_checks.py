"""What the commands refuse before they work, said in words of the command line.

Nothing here loads a model: a file that would be overwritten, an option that contradicts the model
or a forgotten option name is told at once.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import TextIO

from mttrain.errors import ConfigError, DataError, TokenizerError
from mttrain.languages import looks_like_code, same_language, suggested_code

# Parameters of the commands that are fields of TranslateOptions.
SEARCH = (
    "beam", "nbest", "length_penalty", "max_length", "min_length", "no_repeat_ngram", "sample",
    "temperature", "top_k", "top_p", "seed", "split_long", "max_source_length", "batch_tokens",
    "batch_size", "tag",
)  # fmt: skip
MOST_THREADS = 1024  # far more end in a crash of the library that makes them
_FIELD = re.compile(rf"(?<![-\w])(?:{'|'.join(SEARCH)})(?![-\w])")
_EXTRA = re.compile(r"unexpected extra argument(?:s|\(s\))? \((\S+)")


# Names out of somebody's file must not steer the terminal.
_CONTROLS = {code: f"\\x{code:02x}" for code in (*range(32), *range(127, 160)) if code != ord("\n")}


_COLOURS = {"error:": "\x1b[1;31m", "warning:": "\x1b[1;33m"}  # bold red, bold yellow
_PLAIN = "\x1b[0m"


def say(text: str) -> None:
    """Print a line to stderr; where nobody can read it, the work goes on without.

    Control characters are spelled out. On a terminal "error:" and "warning:" are coloured.
    """
    if sys.stderr is None:  # closed; print would take stdout instead
        return
    with contextlib.suppress(OSError):
        lines = text.translate(_CONTROLS).split("\n")
        if coloured(sys.stderr):
            lines = [_with_colour(line) for line in lines]
        print("\n".join(lines), file=sys.stderr, flush=True)


def on_terminal(stream: TextIO | None) -> bool:
    """Whether somebody may be looking at what is written there."""
    return stream is not None and stream.isatty()


def coloured(stream: TextIO | None) -> bool:
    """Whether colours may be written: to a terminal that knows them, unless NO_COLOR is set.

    https://no-color.org: any value but the empty one. Nothing sets colours for a file or pipe.
    """
    known = os.environ.get("TERM", "") not in ("", "dumb") and not os.environ.get("NO_COLOR")
    return known and on_terminal(stream)


def _with_colour(line: str) -> str:
    label = line.split(" ", 1)[0]
    if label not in _COLOURS:
        return line
    return f"{_COLOURS[label]}{label}{_PLAIN}{line[len(label) :]}"


def option_name(name: str) -> str:
    """no_repeat_ngram -> --no-repeat-ngram"""
    return "--" + name.replace("_", "-")


def at_least(option: str, least: int, value: int | None, most: float = math.inf) -> None:
    """Refuse a number that is given and out of its bounds."""
    if value is not None and value < least:
        raise ConfigError(f"{option} is {value}; it must be {least} or more.")
    if value is not None and value > most:
        raise ConfigError(f"{option} is {value}; it must be {most} or less.")


@contextlib.contextmanager
def option_names() -> Iterator[None]:
    """Let a refused search setting be called as on the command line, where it came from."""
    try:
        yield
    except ConfigError as error:
        text = _FIELD.sub(lambda found: option_name(found[0]), str(error))
        raise ConfigError(text) from None


# ---- files ------------------------------------------------------------------------------------


def must_exist(*files: str | None) -> None:
    """Tell of a missing file before a model is loaded; and stdin can be read only once."""
    names = [file for file in files if file is not None]
    for file in names:
        if file != "-" and not os.path.exists(file):
            raise DataError(f"{file}: no such file.")
    if names.count("-") > 1:
        raise ConfigError('Only one of the files can be standard input ("-").')
    if "-" in names and sys.stdin is None:
        raise DataError("Standard input is closed; give an input file.")


def refuse_overwriting(
    output: str | os.PathLike[str] | None, inputs: Mapping[str, str | None]
) -> None:
    """Refuse an output that is one of the inputs (what it is -> path), however it is spelled."""
    if output is None or os.fspath(output) == "-" or not os.path.isfile(output):
        return  # nothing there, or a device
    for what, file in inputs.items():
        if file is not None and _same_file(file, output):
            name = "standard input" if file == "-" else file
            raise ConfigError(f"--output is the {what} ({name}); name another.")


def _same_file(file: str, output: str | os.PathLike[str]) -> bool:
    try:
        mine = os.fstat(sys.stdin.fileno()) if file == "-" else os.stat(file)
        return os.path.samestat(mine, os.stat(output))
    except (OSError, ValueError, AttributeError):  # missing, or a stdin that is no file
        return False


def refuse_replacing_text(output: str | os.PathLike[str]) -> None:
    """A vocabulary may replace an older one and an empty file, but nothing else."""
    if not os.path.isfile(output) or os.path.getsize(output) == 0:
        return
    from mttrain.tokenizer import Tokenizer

    try:
        Tokenizer.load(output)
    except TokenizerError:
        raise ConfigError(
            f"--output {output} exists and is no tokenizer; name another, or remove it first."
        ) from None


def tell_waiting(file: str) -> None:
    """Say that a terminal is read, which otherwise looks as if nothing happened."""
    if file == "-" and sys.stdin is not None and sys.stdin.isatty():
        say("reading standard input; end with Ctrl-D")


@contextlib.contextmanager
def prefix_file_named(file: str | None) -> Iterator[None]:
    """Name the file in the error that there are too few or too many prefixes."""
    from mttrain.segments import PrefixCountError

    try:
        yield
    except PrefixCountError as error:
        raise DataError(f"{file}: {error}") from None


# ---- languages --------------------------------------------------------------------------------


def check_language(lang: str | None) -> None:
    """Refuse well-known wrong names of languages; warn of what does not look like a code."""
    if lang is None:
        return
    code = suggested_code(lang)
    if code is not None:
        raise ConfigError(f"--lang {lang} is not a language code; write {code}.")
    if not looks_like_code(lang):
        say(f"warning: --lang {lang} is not a language code of 2 or 3 letters, such as de or zh.")


def check_target(lang: str | None, model: str, tag: str | None) -> None:
    """Refuse a --lang that contradicts the language into which the model translates."""
    from mttrain.checkpoint import read_meta, resolve_model
    from mttrain.tags import tag_lang

    known = tag_lang(tag, read_meta(resolve_model(model)))
    if lang is not None and known is not None and not same_language(lang, known):
        raise ConfigError(
            f"{model} translates into {known}, not {lang}; remove --lang (for another tokenizer of "
            "BLEU use --tokenize)."
        )


# ---- usage ------------------------------------------------------------------------------------


def extra_argument_hint(message: str, command: str, args: Sequence[str]) -> str:
    """What was probably meant by an argument that belongs to no option; empty if nobody knows."""
    found = _EXTRA.search(message)
    if found is None:
        return ""
    word = found[1].rstrip(")")
    before = args[args.index(word) - 1] if word in args[1:] else ""
    models = [value for option, value in itertools.pairwise(args) if option == "--model"]
    model = os.path.isdir(word) or (before in models and not os.path.isfile(word))
    if command in ("translate", "eval") and model:
        known = "".join(f"--model {name} " for name in models)
        return f"For an ensemble repeat --model: {known}--model {word}."
    if command in ("translate", "encode"):
        return f"Use --input {word}."
    return f"Use --config {word}." if command == "train" else ""
