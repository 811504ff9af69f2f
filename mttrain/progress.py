"""Where a run stands, as plain numbers, and the signals that ask it to stop.

All of `Progress` goes into a checkpoint as JSON: with weights and optimiser it is what exact
resuming needs, because nothing else in training has a state of its own.
"""

from __future__ import annotations

import math
import os
import signal
import time
from dataclasses import dataclass, field, fields
from pathlib import Path
from types import FrameType
from typing import Any

from mttrain.config import TrainConfig
from mttrain.errors import CheckpointError
from mttrain.metrics import Score

_ECHO = 5.0


@dataclass
class Window:
    """Sums since the last log record; saved, so that a resumed run logs what an uninterrupted one
    does."""

    smoothed: float = 0.0
    nll: float = 0.0
    correct: float = 0.0
    target_tokens: float = 0.0
    source_tokens: float = 0.0
    flops: float = 0.0  # of the model, see `flops`
    cells: float = 0.0  # of both sides, with padding
    updates: int = 0
    norm: float = 0.0
    seconds: float = 0.0
    waiting: float = 0.0  # of the seconds, for the next batch


@dataclass
class Progress:
    """Where a run stands; all of it is JSON.

    update: updates done; epoch, batches: the position in the data, in global batches; validated:
    the last update that was validated; seconds: time in updates; elapsed: all time in the loop,
    validation included; best, bad_validations: bookkeeping of the best checkpoint; bad_updates:
    updates in a row that were left out because the gradient was not finite; left_out: all of those;
    cut: updates with a batch that did not fit in memory and was computed in pieces.
    """

    update: int = 0
    epoch: int = 0
    batches: int = 0
    validated: int = 0
    seconds: float = 0.0
    elapsed: float = 0.0
    best: float | None = None
    bad_validations: int = 0
    bad_updates: int = 0
    left_out: int = 0
    cut: int = 0
    window: Window = field(default_factory=Window)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Progress:
        """Inverse of `dataclasses.asdict`; CheckpointError for values that no run can have."""
        window = Window(**_plain(Window, values.get("window")))
        rest = {name: value for name, value in values.items() if name != "window"}
        return cls(**_plain(cls, rest), window=window)


def _plain(kind: type[Progress | Window], values: Any) -> dict[str, Any]:
    """The values, when they are numbers of the types that the fields have."""
    defaults = {field.name: field.default for field in fields(kind)}
    if not isinstance(values, dict) or not values.keys() <= defaults.keys():
        raise CheckpointError("the training state has other fields than a run of this version.")
    for name, value in values.items():
        whole = type(value) is int and 0 <= value < 2**63
        number = type(value) is float and math.isfinite(value)
        absent = value is None and defaults[name] is None
        if not (whole or absent or (number and type(defaults[name]) is not int)):
            raise CheckpointError(f"the training state is damaged: {name} is {str(value)[:40]!r}.")
    return values


def limit_reached(
    train: TrainConfig, update: int, epoch: int, elapsed: float, bad_validations: int
) -> str:
    """Which limit ends training here: max_steps, max_epochs, max_time, patience, or none ("")."""
    reached = {
        "max_steps": train.max_steps is not None and update >= train.max_steps,
        "max_epochs": train.max_epochs is not None and epoch >= train.max_epochs,
        "max_time": train.max_seconds is not None and elapsed >= train.max_seconds,
        "patience": train.patience is not None and bad_validations >= train.patience,
    }
    return next((name for name, yes in reached.items() if yes), "")


@dataclass(frozen=True)
class TrainResult:
    """How a run ended. reason: max_steps, max_epochs, max_time, patience, SIGINT or SIGTERM;
    best: name of the best checkpoint; scores: of the test set, when there is one; records: of a dry
    run, which keeps no log."""

    reason: str
    run_dir: Path
    best: str | None
    scores: list[Score] = field(default_factory=list)
    records: list[dict[str, Any]] = field(default_factory=list)

    @property
    def exit_code(self) -> int:
        """0, or what a shell expects of a process ended by that signal."""
        interrupted = {"SIGINT": signal.SIGINT, "SIGTERM": signal.SIGTERM}.get(self.reason)
        return 128 + interrupted if interrupted else 0


class Interrupt:
    """Remembers SIGINT and SIGTERM until the running update is done; a second signal ends at once.

    Under torchrun one order may come twice, from whoever stops the job and from torchrun, which
    passes it on: there, a signal within `_ECHO` seconds of the first is the same one.

    Used as a context manager; restores the former handlers.
    """

    def __init__(self) -> None:
        self.signal = 0
        self._since = 0.0
        self._echo = _ECHO if "TORCHELASTIC_RUN_ID" in os.environ else 0.0
        self._former: dict[int, Any] = {}

    def __enter__(self) -> Interrupt:
        for number in (signal.SIGINT, signal.SIGTERM):
            try:
                self._former[number] = signal.signal(number, self._remember)
            except ValueError:  # not in the main thread: whoever runs us handles signals
                return self
        return self

    def __exit__(self, *_: object) -> None:
        for number, former in self._former.items():
            signal.signal(number, former)

    def _remember(self, number: int, _: FrameType | None) -> None:
        now = time.monotonic()
        if self.signal and now - self._since < self._echo:
            return
        if self.signal:
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
        self.signal, self._since = number, now
