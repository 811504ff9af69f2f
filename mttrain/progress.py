"""Where a run stands, as plain numbers, and the signals that ask it to stop.

All of `Progress` goes into a checkpoint as JSON: with weights and optimiser it is what exact
resuming needs, because nothing else in training has a state of its own.
"""

from __future__ import annotations

import signal
from dataclasses import dataclass, field
from types import FrameType
from typing import Any


@dataclass
class Window:
    """Sums since the last log record; saved, so that a resumed run logs what an uninterrupted one
    does."""

    smoothed: float = 0.0
    nll: float = 0.0
    correct: float = 0.0
    target_tokens: float = 0.0
    source_tokens: float = 0.0
    updates: int = 0
    norm: float = 0.0
    seconds: float = 0.0


@dataclass
class Progress:
    """Where a run stands; all of it is JSON.

    update: updates done; epoch, batches: the position in the data, in global batches; seconds: time
    in training; best, bad_validations: bookkeeping of the best checkpoint; bad_updates: updates in
    a row that were left out because the gradient was not finite; left_out: all of those.
    """

    update: int = 0
    epoch: int = 0
    batches: int = 0
    seconds: float = 0.0
    validated: int = 0
    best: float | None = None
    best_update: int = 0
    bad_validations: int = 0
    bad_updates: int = 0
    left_out: int = 0
    window: Window = field(default_factory=Window)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Progress:
        """Inverse of `dataclasses.asdict`."""
        return cls(**{**values, "window": Window(**values["window"])})


class Interrupt:
    """Remembers SIGINT and SIGTERM until the running update is done; a second signal ends at once.

    Used as a context manager; restores the former handlers.
    """

    def __init__(self) -> None:
        self.signal = 0
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
        if self.signal:
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
        self.signal = number
