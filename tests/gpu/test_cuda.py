"""Whole runs on GPUs: types, resuming, the log, several devices."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from mttrain.distributed import joined_world
from mttrain.errors import ConfigError
from mttrain.runlog import read_log
from mttrain.trainer import train
from mttrain.translator import TranslateOptions, Translator
from tests.integration.ranks_help import finish_ranks
from tests.integration.test_ranks import Runs, assert_same
from tests.integration.training_help import random_sentences, tiny_config, write_pairs

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="fewer than two CUDA devices")


@pytest.mark.parametrize(
    "settings",
    [
        {"precision": "fp32"},
        {"precision": "fp32", "tf32": True},
        {"precision": "bf16"},
        {"precision": "fp16"},
        {"precision": "bf16", "compile": True, "ema": 0.9},
        pytest.param({"precision": "bf16", "device": "cuda:1"}, marks=two_gpus),
    ],
    ids=lambda settings: "-".join(map(str, settings.values())),
)
def test_train_resume_translate(tmp_path: Path, settings: dict[str, Any]) -> None:
    """M02, M03, R14: masks, tables, moments and step counters are where the kernels want them."""
    lines = random_sentences(60, seed=3)
    pairs = [(line, line) for line in lines]
    data: dict[str, Any] = {
        "train": write_pairs(tmp_path, "train", pairs),
        "valid": write_pairs(tmp_path, "valid", pairs[:10]),
        "workers": 1,
    }
    settings = {"device": "cuda", **settings}
    train(tiny_config(tmp_path, data, train={**settings, "max_steps": 6}))
    result = train(tiny_config(tmp_path, data, train={**settings, "max_steps": 12}))
    records = [r for r in read_log(result.run_dir / "log.jsonl") if r["kind"] == "train"]
    assert [r["step"] for r in records] == list(range(1, 13))
    assert all(math.isfinite(r["loss"]) for r in records)
    memory = torch.cuda.get_device_properties(0).total_memory >> 20
    assert all(0 < r["peak_memory_mb"] < memory for r in records)
    translator = Translator.load(result.run_dir, device="cuda", precision=settings["precision"])
    assert len(translator.translate(lines[:5], TranslateOptions(beam=3))) == 5


@two_gpus
@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_two_gpus_train_what_one_does(tmp_path: Path, kind: str) -> None:
    """R18: by NCCL, in float64, as the processes of test_ranks do by gloo."""
    runs = Runs(tmp_path)
    finish_ranks(tmp_path / "alone", [runs.config("one", device="cuda", accumulate=2)], ranks=1)
    finish_ranks(tmp_path / "both", [runs.config(kind, device="cuda", parallel=kind)])
    assert_same(runs.tensors("one"), runs.tensors(kind))


def test_processes_do_not_share_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL refuses that in the middle of the start, in words of its own."""
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match=r"cuda:0.*2 processes.*use cuda"), joined_world("cuda:0"):
        pass
