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

import contextlib
import os
import signal
import sys
import threading
import traceback
from collections.abc import Iterator, Sequence
from types import FrameType
from typing import Annotated, Any

import typer
import typer.main

import mttrain
from mttrain import (
    cli_attention,
    cli_check,
    cli_completion,
    cli_decode,
    cli_eval,
    cli_export,
    cli_report,
    cli_start,
    cli_text,
    cli_tools,
    cli_train,
)
from mttrain.cli_checks import extra_argument_hint, say
from mttrain.cli_options import Debug
from mttrain.errors import MttrainError

# Every typer has it, but not always under a public name: the base of all wrong-usage errors.
_UsageError: type[Any] = typer.BadParameter.__bases__[0]


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
            if cli_completion.asked():
                return cli_completion.answer(command)
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
        if "TORCHELASTIC_RUN_ID" in os.environ:
            # An order to the whole group comes once more from torchrun: not amid the cleaning up.
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
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
        message = " ".join(error.format_message().split()).replace("Value error, ", "")
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


# ---- commands ---------------------------------------------------------------------------------

# In the order of --help.
app.command()(cli_start.init)
app.command()(cli_start.config)
app.command()(cli_text.tokenize)
app.command()(cli_check.check)
app.command()(cli_text.encode)
app.command()(cli_train.train)
app.command("translate")(cli_decode.translate)
app.command("eval")(cli_eval.evaluate)
app.command()(cli_tools.score)
app.command()(cli_tools.average)
app.command("export")(cli_export.export)
app.command()(cli_report.report)
app.command()(cli_attention.attention)
app.command()(cli_attention.positions)
app.command("completion")(cli_completion.completion_script)
