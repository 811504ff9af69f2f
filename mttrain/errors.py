"""Every error a user can cause, in one tree, each with the exit status of the command line.

    MttrainError                1   base class; the command line prints its text and nothing else
    +-- ConfigError             2   a setting, a key or an option is wrong
    +-- MissingDependency       2   an optional package is not installed
    +-- DataError               3   a text file is missing, not UTF-8, empty or not parallel
    |   +-- TokenizerError      3   a tokenizer file is missing, damaged or of another kind
    |   +-- WriteError          3   a file cannot be written
    +-- CheckpointError         4   a model or checkpoint is missing, damaged or does not fit
    +-- TrainingError           5   training diverged

The text of an error is one or two sentences that name the file, line or key and what to do.
`assert` and the built-in exceptions are for our own mistakes; they are not caught.
"""

from __future__ import annotations

from typing import ClassVar


class MttrainError(Exception):
    """Base of all errors that are the user's to mend; its text is the whole message."""

    exit_code: ClassVar[int] = 1


class ConfigError(MttrainError):
    """A configuration key, value or command-line option is wrong."""

    exit_code = 2


class MissingDependency(MttrainError):
    """A feature needs an optional package that is not installed."""

    exit_code = 2


class DataError(MttrainError):
    """A text file is missing, unreadable, not UTF-8, empty or out of step with its partner."""

    exit_code = 3


class TokenizerError(DataError):
    """A tokenizer file is missing, damaged, or lacks the fixed special ids."""


class WriteError(DataError):
    """A file cannot be written: no room, no right, no folder. What is read is not at fault."""


class CheckpointError(MttrainError):
    """A model directory is missing, damaged, or does not fit what it is used with."""

    exit_code = 4


class TrainingError(MttrainError):
    """Training cannot go on: the loss or the gradients are no longer finite."""

    exit_code = 5


def gist(error: Exception) -> str:
    """The first sentence that another library says of an error, without the place in its source."""
    first = (str(error).strip() or type(error).__name__).splitlines()[0].split(". ")[0]
    return (first.partition("] ")[2] if first.startswith("[") else first)[:200].rstrip(".")


def unequal_lines(one: str, lines: int, other: str, others: int) -> DataError:
    """The error about two texts that should be parallel, with both names and both counts."""
    counted = f"{lines} line" if lines == 1 else f"{lines} lines"
    return DataError(
        f"{one} has {counted} but {other} has {others}; line n of one must belong to line n of "
        "the other."
    )
