"""What every export shares: a directory that appears whole or not at all, text to compare on, and
the report of the comparison.

An export is written into a temporary sibling, compared with the model it was made of, flushed to
the disk and then renamed: what has the final name is complete and was seen to translate as mttrain
does. `mttrain-export.json` in it holds the report, and marks the directory as one that `--replace`
may replace; nothing else is ever removed. Price: one fsync per file.
"""

from __future__ import annotations

import fcntl
import glob
import itertools
import json
import os
import secrets
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from mttrain import __version__
from mttrain.config import load_config
from mttrain.corpus import read_lines, sync_directory
from mttrain.dataset import load_raw
from mttrain.errors import ConfigError, DataError, MttrainError
from mttrain.rundir import remove_leftover, resolve_model

MARKER = "mttrain-export.json"
_EARLIER = "-old"
CHECK_LINES = 100
"""Lines that an export is compared on, unless the caller says otherwise."""


@dataclass(frozen=True)
class ExportReport:
    """An export, and how it compared with the model that it was made of.

    lines               lines that were translated by both
    equal               of these, lines with the same text from both
    largest_difference  between logits for the same prefix; None where they cannot be compared
    notes               what a user of the export should know, a sentence each
    """

    path: str
    format: str
    lines: int
    equal: int
    largest_difference: float | None
    notes: tuple[str, ...] = ()

    def text(self) -> str:
        """Lines for the terminal."""
        compared = f"{self.equal} of {self.lines} lines translated alike"
        if self.largest_difference is not None:
            compared += f", logits differ by at most {self.largest_difference:.1e}"
        return "\n".join((f"{self.path} ({self.format}): {compared}", *self.notes))

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return asdict(self) | {"notes": list(self.notes)}


# ---- the directory ----------------------------------------------------------------------------


@contextmanager
def new_directory(output: Path, *, replace: bool) -> Iterator[Path]:
    """A directory to fill, which gets the name `output` when the block ends without an exception.

    An empty directory of that name is filled; one that holds anything is refused with ConfigError,
    unless it is an export and `replace` says so: then it is replaced as a whole, at the end. Files
    are readable by whoever may read the directory. DataError when the system refuses to write.
    """
    final = Path(os.path.realpath(output))  # a link stays a link
    _clear_up(final)
    _require_free(output, final, replace)
    aside = final.with_name(f".tmp-{final.name}-{secrets.token_hex(4)}")
    try:
        aside.mkdir()
        with _held(aside):
            (aside / MARKER).write_text(json.dumps({"mttrain": __version__}) + "\n")
            yield aside
            _flush(aside)
            _require_free(output, final, replace)  # still: writing took its time
            _put_in_place(aside, final)
    except OSError as error:
        reason = error.strerror or str(error)
        raise DataError(f"{output}: cannot write the export: {reason}.") from None
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def write_report(folder: Path, report: ExportReport) -> None:
    """Keep the report in the directory of the export, for whoever gets it."""
    content = {"mttrain": __version__} | report.to_dict()
    del content["path"]  # where it was made is nobody else's business
    text = json.dumps(content, indent=1, ensure_ascii=False) + "\n"
    (folder / MARKER).write_text(text, encoding="utf-8")


def _require_free(output: Path, final: Path, replace: bool) -> None:
    if not final.parent.is_dir():
        raise DataError(
            f"{output}: cannot write it: the folder {final.parent} does not exist; make it first."
        )
    if not final.exists():
        return
    if not final.is_dir():
        raise ConfigError(f"{output} is a file; name a directory for the export.")
    if not any(final.iterdir()):
        return
    if not (final / MARKER).is_file():
        raise ConfigError(f"{output} holds files that are no export; name another directory.")
    if not replace:
        raise ConfigError(f"{output} is an earlier export; add --replace, or name another.")


def _put_in_place(aside: Path, final: Path) -> None:
    """Rename the written directory; an earlier export steps aside until that is done."""
    earlier = aside.with_name(aside.name + _EARLIER)
    replaces = final.is_dir() and any(final.iterdir())
    if replaces:
        final.rename(earlier)
    try:
        aside.rename(final)
    except BaseException:  # an interruption too
        if replaces:
            earlier.rename(final)
        raise
    sync_directory(final.parent)
    remove_leftover(earlier)


def _flush(folder: Path) -> None:
    """Bring all files to the disk, with the rights that the folder gives (libraries differ)."""
    mode = folder.stat().st_mode
    for path in [folder, *folder.rglob("*")]:
        if path.is_dir():
            sync_directory(path)
            continue
        path.chmod(mode & 0o666)
        with path.open("rb+") as file:
            os.fsync(file.fileno())


@contextmanager
def _held(folder: Path) -> Iterator[None]:
    """Lock the folder, so that another export tells it from the leftover of one that was killed."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        with suppress(OSError):  # not every file system has locks
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(handle)


def _clear_up(final: Path) -> None:
    """Remove what killed exports of this name left; an export that had stepped aside comes back."""
    for path in final.parent.glob(f".tmp-{glob.escape(final.name)}-*"):
        with suppress(OSError):
            handle = os.open(path, os.O_RDONLY)
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if path.name.endswith(_EARLIER) and not final.exists():
                    path.rename(final)
                else:
                    remove_leftover(path)
            finally:
                os.close(handle)


# ---- text to compare on -----------------------------------------------------------------------


def run_directory(model: str) -> Path | None:
    """The run directory that a checkpoint lies in; None for a checkpoint that stands alone."""
    folder = resolve_model(model)
    if folder.parent.name != "checkpoints":
        return None
    run = folder.parent.parent
    return run if (run / "config.yaml").is_file() else None


def check_lines(model: str, given: str | None, most: int = CHECK_LINES) -> list[str]:
    """The first `most` lines with text: of the file `given`, else of the run's validation source.

    ConfigError, saying what to give, where there is neither; DataError for text that cannot be
    read or holds nothing.
    """
    if given is not None:
        lines = first_lines(read_lines(given), most)
        if not lines:
            raise DataError(f"{given} holds no text to compare on; give another file.")
        return lines
    run = run_directory(model)
    if run is None:
        raise ConfigError(
            f"{model} has no config.yaml that names text to compare on; give some with --lines F."
        )
    try:
        data = load_config(run / "config.yaml").data
        sources, _ = load_raw(data.valid, data)
    except MttrainError as error:
        raise ConfigError(
            f"The validation text of {run / 'config.yaml'} cannot be read ({error}) "
            "Give some lines to compare on with --lines F."
        ) from None
    lines = first_lines(sources, most)
    if not lines:
        raise ConfigError(
            f"The validation text of {run / 'config.yaml'} has only blank lines; give others with "
            "--lines F."
        )
    return lines


def first_lines(lines: Iterator[str] | Sequence[str], most: int) -> list[str]:
    """The first `most` lines that are not blank."""
    return list(itertools.islice((line for line in lines if line.strip()), most))
