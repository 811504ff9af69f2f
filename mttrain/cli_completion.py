"""The command `completion`, and the answers to a shell that asks what may come next.

A shell evaluates the script that the command prints. At each TAB the script calls `mttrain` with
the environment variable `_MTTRAIN_COMPLETE`, and `answer` replies instead of running a command:
typer knows the commands, the options and the words that an option takes; for everything else the
shell offers its own files. Price: a start of the program at each TAB, without torch.
"""

from __future__ import annotations

import os
import sys
from enum import StrEnum
from typing import Annotated, Any

import typer

from mttrain.cli_checks import say
from mttrain.cli_options import Debug

PROGRAM = "mttrain"
VARIABLE = "_MTTRAIN_COMPLETE"
Shell = StrEnum("Shell", ["bash", "zsh", "fish"])


def completion_script(
    shell: Annotated[Shell, typer.Argument(help="Whose script.")],
    debug: Debug = False,
) -> None:
    """Print the script that completes commands in a shell."""
    from mttrain.corpus import write_lines

    names = {"prog_name": PROGRAM, "complete_var": VARIABLE}
    script: str = _machinery().get_completion_script(shell=shell.value, **names)
    write_lines(None, script.split("\n"))
    if sys.stdout.isatty():
        say(_HINTS[shell.value])


_HINTS = {
    "bash": 'To use it, put this into ~/.bashrc: eval "$(mttrain completion bash)"',
    "zsh": 'To use it, put this into ~/.zshrc, after compinit: eval "$(mttrain completion zsh)"',
    "fish": "To use it: mttrain completion fish > ~/.config/fish/completions/mttrain.fish",
}


def asked() -> bool:
    """Whether a shell asks, instead of a user."""
    return VARIABLE in os.environ


def answer(command: Any) -> int:
    """Reply to the shell: what may come next on its command line; returns the exit status."""
    machinery = _machinery()
    machinery.completion_init()
    status: int = machinery.shell_complete(command, {}, PROGRAM, VARIABLE, os.environ[VARIABLE])
    return status


def _machinery() -> Any:
    """The module of typer that completes; it declares no names as its public ones."""
    from typer import completion

    return completion
