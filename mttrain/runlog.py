"""The record of a run: one JSON object per line in log.jsonl, and a bar or plain lines on stderr.

Every record has a kind and a time; records about an update have its number as `step`. A record is
in the hands of the operating system before `event` returns, so a killed process loses none, at most
it leaves half a line, which readers ignore and the next writer removes. On resuming,
`truncate_after` drops what lies after the checkpoint, so that no step is there twice.

Price: opening, writing and closing the file, some 50 microseconds per record. The console never
stops a run: when the terminal has gone away, what was meant for it is dropped.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import shutil
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Protocol, TextIO

from tqdm import tqdm

from mttrain.errors import DataError

_CLOSING = ("candidates", "test")  # kinds of records that come right before that of the end
_PLAIN_EVERY = 30.0  # seconds between progress lines where there is no terminal


class Mirror(Protocol):
    """What shows the records elsewhere, too."""

    def begin(self, records: Iterable[Mapping[str, Any]]) -> None:
        """Show these records and no others."""

    def add(self, record: Mapping[str, Any]) -> None:
        """Show one more."""


class RunLog:
    """Writes the records of one run and talks to the console.

    `path` None writes no file (ranks other than the first); `quiet` says nothing on the console,
    which is stderr unless given. A `mirror` that is set before the first record gets all of them,
    those of earlier starts included.
    """

    def __init__(
        self, path: Path | None, *, quiet: bool = False, console: TextIO | None = None
    ) -> None:
        self.path = path
        self._console = None if quiet else (console or sys.stderr)
        self._bar: ProgressBar | None = None
        self._mended = False
        self.mirror: Mirror | None = None
        self._mirrored = False

    def event(self, kind: str, **fields: Any) -> None:
        """Append one record; numbers that JSON lacks become the strings "nan", "inf", "-inf"."""
        assert not {"kind", "time"} & fields.keys(), "these names belong to every record"
        if self.path is None:
            return
        now = datetime.now(UTC).isoformat(timespec="milliseconds")
        record = _plain({"kind": kind, "time": now, **fields})
        text = json.dumps(record, ensure_ascii=False)
        try:
            if not self._mended:
                _drop_torn_line(self.path)
                self._mended = True
            with open(self.path, "ab") as file:
                file.write(text.encode("utf-8") + b"\n")
        except OSError as error:
            raise DataError(f"{self.path}: cannot write it: {error.strerror}.") from None
        if self.mirror is not None and self._mirrored:
            self.mirror.add(record)
        else:
            self._mirror_all()

    def _mirror_all(self) -> None:
        """Show in the mirror what the file holds."""
        if self.mirror is not None and self.path is not None:
            self._mirrored = True
            records = map(_record, _whole_lines(self.path))
            self.mirror.begin([record for record in records if record is not None])

    def say(self, text: str) -> None:
        """Print a line, above the bar if there is one."""
        if self._console is None:
            return
        with contextlib.suppress(OSError, ValueError):
            if self._bar is not None:
                self._bar.write(text)
            else:
                print(text, file=self._console, flush=True)

    @contextlib.contextmanager
    def progress(
        self, total: int | None, initial: int = 0, *, what: str = "update"
    ) -> Iterator[ProgressBar]:
        """Show progress through `total` updates, or `what` is counted (None: unknown number)."""
        self._bar = ProgressBar(self._console, total, initial, what)
        try:
            yield self._bar
        finally:
            self._bar.close()
            self._bar = None

    def truncate_after(self, step: int, validated: int | None = None) -> None:
        """Drop the records with a greater `step`, those of an end that was not reached, and a torn
        last line; others stay as they are.

        validated: the last update whose validation is in the state that goes on. An update may be
        saved by a signal, validated after resuming, and its second save killed: then its validation
        comes again, and the record of the first one goes.
        """
        if self.path is None or not self.path.exists():
            return
        scored = step if validated is None else validated  # 0: none yet
        kept: list[bytes] = []
        closing: list[bytes] = []  # the resumed run writes them again, unless the end follows
        for line in _whole_lines(self.path):
            record = _record(line)
            if record is None or _later(record, step):
                continue
            if record.get("kind") in ("valid", "best") and _later(record, scored):
                continue
            if record.get("kind") in _CLOSING:
                closing.append(line + b"\n")
                continue
            if record.get("kind") == "end":
                kept += closing
            closing = []
            kept.append(line + b"\n")
        temporary = self.path.with_name(f".tmp-{os.getpid()}-{self.path.name}")
        try:
            with open(temporary, "wb") as file:
                file.writelines(kept)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, self.path)
        except OSError as error:
            temporary.unlink(missing_ok=True)
            raise DataError(f"{self.path}: cannot write it: {error.strerror}.") from None
        self._mirror_all()


class ProgressBar:
    """A bar on a terminal; elsewhere a plain line now and then. Made by `RunLog.progress`."""

    def __init__(self, console: TextIO | None, total: int | None, initial: int, what: str) -> None:
        self._console = console
        self._what = what
        self._total = total
        self._spoken = -math.inf  # the first line comes at once: a sign of life
        self._bar: _Bar | None = None
        if console is not None and console.isatty():
            known = shutil.get_terminal_size((0, 0)).columns > 0
            self._bar = _Bar(
                total=total,
                initial=initial,
                file=console,
                unit=f" {what}s",
                dynamic_ncols=known,
                ncols=None if known else 80,  # a terminal that gives no width would show no bar
            )

    def update(self, step: int, **postfix: object) -> None:
        """Show that `step` updates are done, and the named values beside it."""
        with contextlib.suppress(OSError, ValueError):
            if self._bar is not None:
                self._bar.set_postfix(postfix, refresh=False)
                self._bar.update(step - self._bar.n)
            elif time.monotonic() - self._spoken >= _PLAIN_EVERY:
                values = "".join(f"  {name} {value}" for name, value in postfix.items())
                of = "" if self._total is None else f" of {self._total}"
                self.write(f"{self._what} {step}{of}{values}")

    def write(self, text: str) -> None:
        """Print a line above the bar."""
        if self._bar is not None:
            _Bar.write(text, file=self._console)
        elif self._console is not None:
            print(text, file=self._console, flush=True)
        self._spoken = time.monotonic()

    def close(self) -> None:
        """Leave the bar as it stands."""
        if self._bar is not None:
            with contextlib.suppress(OSError, ValueError):
                self._bar.close()


class _Bar(tqdm):  # type: ignore[type-arg]  # the class is generic in the stubs only
    monitor_interval = 0  # no helper thread: forked loader workers would inherit its locks


def read_log(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """All records of a log, oldest first; a torn last line is ignored.

    DataError when the file cannot be read or a line is not a record.
    """
    try:
        lines = _whole_lines(Path(path))
    except OSError as error:
        raise DataError(f"{path}: cannot read it: {error.strerror}.") from None
    records = []
    for number, line in enumerate(lines, 1):
        record = _record(line)
        if record is None:
            raise DataError(f"{path}, line {number}: not a log record.")
        records.append(record)
    return records


def _whole_lines(path: Path) -> list[bytes]:
    """The lines that end in a line feed: what comes after the last one was never finished."""
    return path.read_bytes().split(b"\n")[:-1]


def _record(line: bytes) -> dict[str, Any] | None:
    try:
        record = json.loads(line)
    except ValueError:
        return None
    return record if isinstance(record, dict) else None


def _later(record: dict[str, Any], step: int) -> bool:
    number = record.get("step")
    return isinstance(number, int) and number > step


def _drop_torn_line(path: Path) -> None:
    """Cut off what was being written when an earlier process died."""
    if path.exists():
        whole = sum(len(line) + 1 for line in _whole_lines(path))
        if whole < path.stat().st_size:
            os.truncate(path, whole)


def _plain(value: Any) -> Any:
    """The value in JSON's own types; scalars of numpy and torch give their Python number."""
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else str(float(value))
    if value is None or isinstance(value, bool | int | str):
        return value
    return _plain(value.item()) if hasattr(value, "item") else str(value)
