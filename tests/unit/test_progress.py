"""Where a run stands, read back from a file."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import pytest

from mttrain.errors import CheckpointError
from mttrain.progress import Progress, Window


def test_round_trip() -> None:
    """R22: all of it is JSON, the record in the making too."""
    progress = Progress(update=7, epoch=1, batches=3, best=-0.5, window=Window(nll=3.5, updates=2))
    assert Progress.from_dict(asdict(progress)) == progress
    old = {name: value for name, value in asdict(progress).items() if name != "cut"}
    assert Progress.from_dict(old) == progress  # written before there was such a field


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("update", -1), ("update", "7"), ("update", 1.5), ("update", True), ("batches", 10**30),
        ("best", "good"), ("best", float("nan")), ("epoch", None), ("window", None),
        ("window", {"nll": []}), ("window", {"other": 1}), ("other", 1),
    ],
)  # fmt: skip
def test_values_that_no_run_has(name: str, value: Any) -> None:
    """R22, X06: they ended in "unexpected" in the middle of a start, or in a loop without end."""
    with pytest.raises(CheckpointError, match="the training state"):
        Progress.from_dict({**asdict(Progress()), name: value})
