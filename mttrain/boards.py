"""The records of a run for TensorBoard: the numbers of log.jsonl as curves, the samples as text.

Only what `RunLog` writes is shown, so the curves are those of the log: a record becomes one event
at its step and its time. Scalars are `train/loss`, `train/perplexity`, `train/lr`, ...,
`valid/bleu`, `valid/chrf`, ..., `average/...` and `test/...`, in float32, which is all that the
format has; `valid/samples` is a table of source, output and reference.

log.jsonl stays the truth: at each start the events are made again from what it holds, so that no
step comes twice after a resume, and a run that had no board before gets a whole one. An event that
cannot be written ends the board with a warning and never the run; the next start makes it again.

Events go through the `tensorboard` package's own record writer, without its thread, whose locks
the loader workers would inherit. Price: 0.6 s to import it at the start of a run, 0.4 ms a
record (its checksum is written in Python), and once more for each record of the log at a resume.
"""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

from mttrain.errors import MissingDependency
from mttrain.metrics import perplexity

FOLDER = "tensorboard"
EVENTS = "events.out.tfevents.*.mttrain"  # ours; files of other writers in the folder stay
_NUMBERS = frozenset({"train", "valid"})  # kinds of records whose every number is a curve
_NO_CURVES = frozenset({"step", "epoch", "beam", "length_penalty"})
_MARKDOWN = re.compile(r"([\\`*_{}\[\]()#+.!|<>~-])")


def require_tensorboard() -> None:
    """Raise MissingDependency when the package that writes events is not installed."""
    try:
        import tensorboard.summary.writer.record_writer  # noqa: F401
    except ImportError:
        raise MissingDependency(
            "train.tensorboard needs a package that is not installed: pip install "
            "'mttrain[tensorboard]', or set train.tensorboard to false."
        ) from None


def remove_events(folder: Path) -> None:
    """Remove the event files of a run, and their folder when nothing else is in it."""
    for path in folder.glob(EVENTS):
        path.unlink()
    if folder.is_dir() and not any(folder.iterdir()):
        folder.rmdir()


class Board:
    """Mirrors records into `folder`. warn: told once when that is no longer possible."""

    def __init__(self, folder: Path, warn: Callable[[str], None]) -> None:
        require_tensorboard()
        self._folder, self._warn = folder, warn
        self._path: Path | None = None
        self._working = True

    def begin(self, records: Iterable[Mapping[str, Any]]) -> None:
        """Start again: the events of these records, and no others."""
        from tensorboard.compat.proto import event_pb2

        self._working = True
        now = time.time()
        head = event_pb2.Event(wall_time=now, file_version="brain.Event:2")
        # A TensorBoard that is running drops what it has read of this run before.
        start = event_pb2.Event(wall_time=now, step=0)
        start.session_log.status = event_pb2.SessionLog.START
        with self._warning():
            self._folder.mkdir(parents=True, exist_ok=True)
            remove = list(self._folder.glob(EVENTS))
            path = self._folder / EVENTS.replace("*", f"{time.time_ns():020d}")
            for old in remove:
                old.unlink()
            self._path = path
            self._write([head, start, *(event for record in records for event in _events(record))])

    def add(self, record: Mapping[str, Any]) -> None:
        """The events of one more record; they are with the operating system when this returns."""
        if self._working:
            with self._warning():
                self._write(_events(record))

    def _write(self, events: Iterable[Any]) -> None:
        from tensorboard.summary.writer.record_writer import RecordWriter

        assert self._path is not None, "a board begins with the records that there are"
        with open(self._path, "ab") as file:
            writer = RecordWriter(file)
            for event in events:
                writer.write(event.SerializeToString())

    @contextlib.contextmanager
    def _warning(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            self._working = False
            self._warn(
                f"warning: {self._folder}: cannot write it: {error.strerror or error}. Training "
                "goes on without TensorBoard; the next start makes its files again from log.jsonl."
            )


def _events(record: Mapping[str, Any]) -> Iterator[Any]:
    """The event of a record with numbers, and that of its samples."""
    from tensorboard.compat.proto import event_pb2, summary_pb2

    step = record.get("step")
    if not isinstance(step, int):
        return
    when = datetime.fromisoformat(record["time"]).timestamp()
    values = [summary_pb2.Summary.Value(tag=t, simple_value=v) for t, v in scalars(record).items()]
    samples = record.get("samples")
    if samples:
        values.append(_samples(f"{record['kind']}/samples", samples))
    if values:
        yield event_pb2.Event(wall_time=when, step=step, summary=summary_pb2.Summary(value=values))


def scalars(record: Mapping[str, Any]) -> dict[str, float]:
    """Tag -> value of the numbers in a record; NaN and infinities are there, as what they are."""
    kind, numbers = record["kind"], dict[str, Any]()
    if kind in _NUMBERS:
        numbers = {name: value for name, value in record.items() if name not in _NO_CURVES}
        nll = _number(record.get("nll"))
        if nll is not None and "perplexity" not in numbers:
            numbers["perplexity"] = perplexity(nll)
    elif kind == "candidates":
        numbers = {
            f"{candidate['name']}/{name}": value
            for candidate in record["candidates"]
            for name, value in candidate["scores"].items()
        }
    elif kind == "test":
        numbers = {score["name"].lower(): score["value"] for score in record["scores"]}
    found = {f"{kind}/{name}": _number(value) for name, value in numbers.items()}
    return {tag: value for tag, value in found.items() if value is not None}


def _number(value: object) -> float | None:
    """A number of a log record; those that JSON lacks are text there."""
    if value in ("nan", "inf", "-inf"):
        return float(str(value))
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if number else None  # type: ignore[arg-type]


def _samples(tag: str, samples: Iterable[Mapping[str, str]]) -> Any:
    """A table of texts, with what Markdown would read as a mark spelled out."""
    from tensorboard.plugins.text.summary_v2 import text_pb

    names = ("source", "output", "reference")
    rows = [[_MARKDOWN.sub(r"\\\1", sample[name]) for name in names] for sample in samples]
    return text_pb(tag, [list(names), *rows]).value[0]
