"""What only a GPU can show: placement, mixed precision, the fused optimiser on resuming."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from mttrain.runlog import read_log
from mttrain.trainer import train
from mttrain.translator import TranslateOptions, Translator
from tests.integration.training_help import random_sentences, tiny_config, write_pairs

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_train_resume_translate(tmp_path: Path, precision: str) -> None:
    """M02, M03, R14: masks, tables, moments and step counters are where the kernels want them."""
    lines = random_sentences(60, seed=3)
    pairs = [(line, line) for line in lines]
    data = {
        "train": write_pairs(tmp_path, "train", pairs),
        "valid": write_pairs(tmp_path, "valid", pairs[:10]),
    }
    settings = {"device": "cuda", "precision": precision}
    train(tiny_config(tmp_path, data, train={**settings, "max_steps": 6}))
    result = train(tiny_config(tmp_path, data, train={**settings, "max_steps": 12}))
    records = [r for r in read_log(result.run_dir / "log.jsonl") if r["kind"] == "train"]
    assert [r["step"] for r in records] == list(range(1, 13))
    assert all(math.isfinite(r["loss"]) for r in records)
    translator = Translator.load(result.run_dir, device="cuda", precision=precision)
    assert len(translator.translate(lines[:5], TranslateOptions(beam=3))) == 5
