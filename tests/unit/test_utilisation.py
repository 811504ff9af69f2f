"""Speeds and shares of a log record, and the peak that they are shares of."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mttrain.dataset import Example, collate, empty_batch
from mttrain.distributed import World
from mttrain.flops import LengthSums, model_products
from mttrain.progress import Window
from mttrain.runlog import read_log
from mttrain.tokenizer import Tokenizer
from mttrain.trainer import train
from mttrain.utilisation import Meter, _fastest, matmul_peak, measured_peak
from tests.integration.training_help import random_sentences, tiny_config, write_pairs

CPU = torch.device("cpu")


def example(source: int, target: int) -> Example:
    return Example(np.full(source, 9, np.uint16), np.full(target, 9, np.uint16), 0)


def test_record_by_hand(tmp_path: Path) -> None:
    """Padding was counted as tokens, or the peak of one process beside the work of two."""
    files = {"source": "a", "target": "b"}
    meter = Meter(tiny_config(tmp_path, {"train": files, "valid": files}), 100)
    meter.peak = 1e9
    window = Window()
    for batch in (collate([example(3, 5), example(4, 2)]), empty_batch()):
        meter.add(window, batch)
    products = model_products(tiny_config(tmp_path, {"train": files, "valid": files}).model, 100)
    work = products.training(LengthSums.of([3, 4], [5, 2]))
    assert window.flops == work
    assert window.cells == 2 * 4 + 2 * 5 + 2  # an empty batch is one position a side
    sums = {"source_tokens": 7.0, "target_tokens": 7.0, "cells": 20.0, "flops": window.flops}
    assert meter.record(sums, 2.0) == {
        "tokens_per_second": 3.5,
        "source_tokens_per_second": 3.5,
        "nonpadding_per_second": 7.0,
        "padding": 0.3,
        "flops": work,
        "flops_per_second": float(f"{work / 2:.4g}"),
        "utilisation": round(work / 2 / 1e9, 4),
    }
    assert meter.record(sums, 0.0)["utilisation"] == 0.0  # a clock that stands still
    meter.peak = 0.0
    assert meter.record(sums, 2.0)["utilisation"] is None


def test_work_survives_the_loader() -> None:
    """Pinning a batch made a new one, which had no work."""
    batch = collate([example(3, 5), example(4, 2)])
    assert batch.to("cpu").work == batch.work == LengthSums.of([3, 4], [5, 2])


def test_fastest_of_all() -> None:
    """A mean would take what other programs do meanwhile for the device's fault."""
    best, count = _fastest([lambda: time.sleep(0.03), lambda: None], CPU, 0.1)
    assert best < 0.03 and count >= 2 and count % 2 == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_peak_is_a_time_of_a_product(dtype: torch.dtype) -> None:
    """The figure stands for 2 n^3 operations in no more than the time that one product takes here;
    it is measured once, and touches no generator of random numbers. A processor without products of
    float16 took minutes for it."""
    state = torch.get_rng_state()
    peak, how = matmul_peak(CPU, dtype, torch.get_num_threads())
    assert torch.equal(state, torch.get_rng_state())
    assert str(dtype).removeprefix("torch.") in how
    width = int(how.split(" x ")[1].split()[0])
    a = torch.ones(width, width, dtype=dtype)
    start = time.perf_counter()
    for _ in range(3):
        a @ a
    assert peak > 0.2 * 3 * 2 * width**3 / (time.perf_counter() - start)
    assert matmul_peak(CPU, dtype, torch.get_num_threads()) == (peak, how)
    if dtype == torch.float32:
        assert measured_peak(World(0, 1, CPU), "fp32") == (peak, how)


def test_log_of_a_run(tmp_path: Path) -> None:
    """The work of an epoch is that of its pairs, whatever they are batched and padded with; the
    peak stands in the record of each start."""
    lines = random_sentences(60, seed=3)
    pairs = [(line, f"{line} {line}") for line in lines]
    data = {
        "train": write_pairs(tmp_path, "train", pairs),
        "valid": write_pairs(tmp_path, "valid", pairs[:5]),
    }
    settings: dict[str, Any] = {"max_steps": None, "max_epochs": 1, "accumulate": 2}
    result = train(tiny_config(tmp_path, data, train=settings))
    records = read_log(result.run_dir / "log.jsonl")
    tokenizer = Tokenizer.load(result.run_dir / "tokenizer.json")
    source, target = (
        [len(tokenizer.encode(pair[side])) + 1 for pair in pairs] for side in range(2)
    )
    config = tiny_config(tmp_path, data)
    work = model_products(config.model, tokenizer.size).training(LengthSums.of(source, target))
    updates = [record for record in records if record["kind"] == "train"]
    assert sum(record["flops"] for record in updates) == work
    begin = next(record for record in records if record["kind"] == "begin")
    assert begin["peak_flops"] > 0 and "float32" in begin["peak_how"]
    for record in updates:
        assert record["utilisation"] == pytest.approx(
            record["flops_per_second"] / begin["peak_flops"], rel=0.01, abs=1e-4
        )
        both = record["tokens_per_second"] + record["source_tokens_per_second"]
        assert record["nonpadding_per_second"] == pytest.approx(both, abs=0.2)
    tokens = sum(record["source_tokens"] + record["target_tokens"] for record in updates)
    cells = sum(
        (record["source_tokens"] + record["target_tokens"]) / (1 - record["padding"])
        for record in updates
    )
    epoch = next(record for record in records if record["kind"] == "epoch")
    assert 1 - tokens / cells == pytest.approx(epoch["padding"], abs=2e-3)
    train(tiny_config(tmp_path, data, train={**settings, "max_epochs": 2}))
    resumed = [r for r in read_log(result.run_dir / "log.jsonl") if r["kind"] == "resume"]
    assert resumed[0]["peak_flops"] == begin["peak_flops"]  # measured once in a process
