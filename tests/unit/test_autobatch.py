"""The searches for a batch on made-up machines, and the one on this machine end to end."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mttrain import autobatch
from mttrain.autobatch import FEWEST_UPDATES, LEAST, MARGIN, fastest, largest_safe, largest_useful
from mttrain.config import load_config
from mttrain.errors import ConfigError
from mttrain.runlog import read_log
from mttrain.trainer import train
from tests.integration.training_help import random_sentences, tiny_config, write_pairs

GB = 10**9


def line(tokens: int) -> int:
    return 2 * GB + 300_000 * tokens


def steps(tokens: int) -> int:
    """An allocator that takes blocks, five times as large as PyTorch's largest."""
    return 2 * GB + -(-300_000 * tokens // 10**8) * 10**8


def bent(tokens: int) -> int:
    """Attention weights that grow faster than the batch."""
    return 2 * GB + 100_000 * tokens + 8 * tokens**2


@pytest.mark.parametrize("peak", [line, steps, bent])
@pytest.mark.parametrize("limit", [2 * GB + 200_000_000, 5 * GB, 40 * GB, 140 * GB])
@pytest.mark.parametrize("ends", [0.5, 1.0, 2.0])
def test_largest_safe_batch(peak: Callable[[int], int], limit: int, ends: float) -> None:
    """Never above the limit, not even where memory ends before it (ends x the limit), and not far
    below: against all sizes tried one by one."""
    tried: list[int] = []

    def used(tokens: int) -> int | None:
        tried.append(tokens)
        return peak(tokens) if peak(tokens) <= ends * limit else None

    most = 1_000_000
    safe = [n for n in range(512, most + 1, 256) if peak(n) <= min(1.0, ends) * limit]
    found = largest_safe(used, limit, most)
    assert len(tried) <= 20
    if not safe:
        assert found is None
    else:
        assert found is not None and found in tried and peak(found) <= limit
        assert 0.75 * safe[-1] <= found <= safe[-1] or safe[-1] - found <= 512


def test_no_larger_than_useful() -> None:
    tried: list[int] = []
    assert largest_safe(lambda n: tried.append(n) or 1, 100, 5_000) == 5_000  # type: ignore[func-returns-value]
    assert max(tried) == 5_000


def test_fastest_batch() -> None:
    """A larger batch that is faster by a hair was taken: fewer updates of the same text for it."""
    speeds = {512: 100.0, 1024: 150.0, 2048: 150.0 * (MARGIN - 0.01), 4096: 160.0, 8192: 90.0}
    assert fastest(lambda n: speeds[n], 8192) == 4096
    assert fastest(lambda n: speeds[n], 2048) == 1024
    falling = {512: 100.0, 1024: 90.0, 2048: 80.0}  # larger ones are not asked for
    assert fastest(lambda n: falling[n], 10**6) == 512
    slow = {512: 150.0, 1024: 200.0}  # 2048 would take more than ten seconds
    assert fastest(lambda n: slow[n], 10**6, longest=10.0) == 1024


def test_an_epoch_keeps_its_updates(tmp_path: Path) -> None:
    """Of a small corpus a large batch made an epoch of one update."""
    files = {"source": "a", "target": "b"}
    config = tiny_config(tmp_path, {"train": files, "valid": files}, train={"accumulate": 3})
    source, target = np.full(5000, 30, np.int32), np.full(5000, 20, np.int32)
    most = largest_useful(config, source, target, 2)
    assert 5000 * 30 / (most * 3 * 2) >= FEWEST_UPDATES > 5000 * 30 / ((most + 256) * 3 * 2)
    assert largest_useful(config, source[:10], target[:10], 2) == LEAST


def corpus(folder: Path, pairs: int) -> dict[str, Any]:
    lines = random_sentences(pairs, seed=3)
    return {
        "train": write_pairs(folder, "train", [(line, line) for line in lines]),
        "valid": write_pairs(folder, "valid", [(line, line) for line in lines[:5]]),
    }


def test_run_keeps_what_it_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The number stands in config.yaml before the first update, and a resumed run, whose clock
    might say otherwise, plans the same batches; to ask for another one is another run."""
    monkeypatch.setattr(autobatch, "_SECONDS", 0.0)
    data = corpus(tmp_path, 2500)
    settings: dict[str, Any] = {"batch_tokens": "auto", "max_steps": 2, "valid_every": 2}
    result = train(tiny_config(tmp_path, data, train=settings))
    kept = load_config(result.run_dir / "config.yaml").train.batch_tokens
    records = read_log(result.run_dir / "log.jsonl")
    found = next(record for record in records if record["kind"] == "batch_tokens")
    assert kept == found["batch_tokens"] in [size for size, _ in found["trials"]]
    assert found["by"] == "speed" and all(speed > 0 for _, speed in found["trials"])
    begin = next(record for record in records if record["kind"] == "begin")
    assert begin["config"]["train"]["batch_tokens"] == kept
    monkeypatch.setattr(autobatch, "fastest", lambda *_: 512 + kept)  # must not be asked again
    train(tiny_config(tmp_path, data, train={**settings, "max_steps": 4}))
    records = read_log(result.run_dir / "log.jsonl")
    assert [record["kind"] for record in records].count("batch_tokens") == 1
    assert load_config(result.run_dir / "config.yaml").train.batch_tokens == kept
    assert not [c for r in records if r["kind"] == "resume" for c in r["changes"] if "batch" in c]
    other = tiny_config(tmp_path, data, train={**settings, "batch_tokens": kept + 1})
    with pytest.raises(ConfigError, match=f"batch_tokens: {kept} -> {kept + 1}"):
        train(other)


def test_same_weights_as_with_the_number(tmp_path: Path) -> None:
    """The probe draws nothing that training draws, and leaves nothing behind."""
    data = corpus(tmp_path, 60)
    runs = []
    for name, value in (("auto", "auto"), ("number", LEAST)):
        config = tiny_config(tmp_path / name, data, train={"batch_tokens": value, "max_steps": 3})
        runs.append(train(config).run_dir)
    losses = [
        [record["loss"] for record in read_log(run / "log.jsonl") if record["kind"] == "train"]
        for run in runs
    ]
    assert losses[0] == losses[1] and len(losses[0]) == 3
