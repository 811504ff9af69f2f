"""The searches for a batch on made-up machines, and the one on this machine end to end."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mttrain import autobatch
from mttrain.autobatch import (
    FEWEST_UPDATES,
    LEAST,
    MARGIN,
    fastest,
    in_turns,
    largest_safe,
    largest_useful,
)
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


def beside(speeds: dict[int, float], fades: float = 1.0) -> Callable[[Any], tuple[float, ...]]:
    """Two of these speeds at a time, on a machine that slows down from one look to the next."""
    looks = itertools.count()

    def speeds_of(sizes: tuple[int, int]) -> tuple[float, ...]:
        now = fades ** next(looks)
        return tuple(now * speeds[size] for size in sizes)

    return speeds_of


def test_fastest_batch() -> None:
    """A larger batch that is faster by a hair was taken: fewer updates of the same text for it."""
    speeds = {512: 100.0, 1024: 150.0, 2048: 150.0 * (MARGIN - 0.01), 4096: 160.0, 8192: 90.0}
    assert fastest(beside(speeds), 8192) == 4096
    assert fastest(beside(speeds), 2048) == 1024
    assert fastest(beside(speeds), 1000) == 512
    falling = {512: 100.0, 1024: 90.0, 2048: 80.0}  # larger ones are not asked for
    assert fastest(beside(falling), 10**6) == 512
    slow = {512: 150.0, 1024: 200.0}  # 2048 would take more than ten seconds
    assert fastest(beside(slow), 10**6, longest=10.0) == 1024


def test_other_programs_do_not_decide(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sizes were tried one after the other: on a machine that others begin to use meanwhile the
    smallest won; one look that was disturbed decided."""
    speeds = {512: 100.0, 1024: 110.0, 2048: 120.0, 4096: 120.0, 8192: 120.0}
    assert fastest(beside(speeds, fades=0.8), 8192) == 2048
    monkeypatch.setattr(autobatch, "_SECONDS", 0.0)
    order: list[str] = []

    def competitor(name: str, values: list[float]) -> Iterator[float]:
        for value in values:
            order.append(name)
            yield value

    one, two = competitor("A", [1.0, 70.0, 7.0, 69.0]), competitor("B", [999.0, 80.0, 81.0, 8.0])
    assert in_turns([one, two]) == [69.0, 80.0]
    assert "".join(order) == "AB" * 4  # the first values, of a cold start, do not count


def a_probe(folder: Path, lengths: tuple[list[int], list[int]], **settings: Any) -> Any:
    files = {"source": "a", "target": "b"}
    config = tiny_config(folder, {"train": files, "valid": files}, **settings)
    sides = [np.array(side, np.int32) for side in lengths]
    return autobatch._Probe(config, (sides[0], sides[1]), (50, 50), torch.device("cpu"))


def test_turns_hold_equally_much(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a small batch a turn takes several updates: else it would find the caches full of what the
    large one left. A batch holds at least a pair, and pairs no batch has room for count, too."""
    probe = a_probe(tmp_path, ([600, 30, 30] * 40, [20] * 120), train={"accumulate": 2})
    updates: list[list[Any]] = []
    monkeypatch.setattr(probe, "_update", lambda group: not updates.append(group))
    turns = probe.turns(512, 2048)
    assert next(turns) > 0 and [len(group) for group in updates] == [2]
    assert next(turns) > 0 and [len(group) for group in updates] == [2] * 5
    shapes = {tuple(batch.source.shape) for group in updates for batch in group}
    assert (1, 600) in shapes and all(n == 1 or n * length <= 512 for n, length in shapes)
    assert probe.longest == 600
    monkeypatch.setattr(probe, "_update", lambda group: False)
    assert next(turns) == 0.0  # what does not fit has no speed


def test_longest_pair_of_any_segmentation(tmp_path: Path) -> None:
    """BPE-dropout makes pairs longer in another epoch than in the one that was looked at."""
    plain = a_probe(tmp_path, ([9, 30, 8], [20, 4, 7]))
    dropping = a_probe(tmp_path, ([9, 30, 8], [20, 4, 7]), tokenizer={"dropout": 0.1})
    assert (plain.longest, dropping.longest) == (30, 64)


def test_no_memory_for_the_moments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory may end behind the last backward, where no batch can be cut: such a size is too large,
    and no fault of the program."""
    probe = a_probe(tmp_path, ([30] * 50, [20] * 50))

    def refuse() -> None:
        raise torch.OutOfMemoryError("pretended")

    group = [probe._batch([30], [20])]
    assert probe._update(group)
    monkeypatch.setattr(probe.updater.optimizer, "step", refuse)
    assert not probe._update(group)


def test_an_epoch_keeps_its_updates(tmp_path: Path) -> None:
    """Of a small corpus a large batch made an epoch of one update."""
    files = {"source": "a", "target": "b"}
    config = tiny_config(tmp_path, {"train": files, "valid": files}, train={"accumulate": 3})
    cells = 5000 * 30
    most = largest_useful(config, cells, 2)
    assert cells / (most * 3 * 2) >= FEWEST_UPDATES > cells / ((most + 256) * 3 * 2)
    assert largest_useful(config, 10 * 30, 2) == LEAST


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
