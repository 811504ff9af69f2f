"""On a GPU: the largest safe batch, the memory model, and the peak of matrix products."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from mttrain.dataset import Batch
from mttrain.distributed import World
from mttrain.memory import BatchShape, Setting, attention_kernel, training_memory
from mttrain.model import Transformer
from mttrain.runlog import read_log
from mttrain.trainer import train
from mttrain.update import Updater
from mttrain.utilisation import PEAK_SECONDS, matmul_peak
from tests.integration.training_help import random_sentences, tiny_config, write_pairs

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
LARGE = {"d_model": 512, "d_ff": 2048, "num_heads": 8, "encoder_layers": 3, "decoder_layers": 3}


def test_auto_takes_what_memory_allows(tmp_path: Path) -> None:
    """The batch that was found trains without one that must be cut; it is as large as the corpus
    or the memory lets it be."""
    lines = random_sentences(30_000, seed=3)
    data = {
        "train": write_pairs(tmp_path, "train", [(line, line) for line in lines]),
        "valid": write_pairs(tmp_path, "valid", [(line, line) for line in lines[:5]]),
    }
    settings: dict[str, Any] = {"batch_tokens": "auto", "device": "cuda", "max_steps": 15}
    result = train(tiny_config(tmp_path, data, train=settings))
    records = read_log(result.run_dir / "log.jsonl")
    found = next(record for record in records if record["kind"] == "batch_tokens")
    assert found["by"] == "memory" and found["batch_tokens"] >= 8192
    updates = [record for record in records if record["kind"] == "train"]
    assert updates[-1]["cut"] == 0 and updates[-1]["utilisation"] > 0


@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_memory_is_near_the_estimate(tmp_path: Path, precision: str, dropout: float) -> None:
    """Of an update in which everything is full length; with dropout of attention weights, whose
    softmax autocast leaves in float32."""
    device = torch.device("cuda")
    files = {"source": "a", "target": "b"}
    config = tiny_config(
        tmp_path, {"train": files, "valid": files}, model={**LARGE, "attention_dropout": dropout},
        train={"precision": precision, "device": "cuda"},
    )  # fmt: skip
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    model = Transformer(config.model, 8000, 8000).to(device).train()
    updater = Updater(config, model, World(0, 1, device), str)
    shape = BatchShape(256, 64, 64)
    ids = torch.randint(4, 8000, (shape.rows, shape.source))
    tokens = ids.numel()
    for update in (1, 2):
        updater.run([Batch(ids, ids, ids, list(range(shape.rows)), tokens, tokens)], tokens, update)
    used = torch.cuda.max_memory_allocated() - before
    narrow, kernel = 2 if precision == "bf16" else 4, attention_kernel(config.model, False, shape)
    setting = Setting(config.model, 8000, 8000, narrow=narrow, kernel=kernel)
    estimate = training_memory(setting, shape).total
    assert 0.6 * estimate < used < 1.2 * estimate


def test_peak_is_measured_quickly() -> None:
    """Half precision multiplies faster than full precision, and a matrix is not built for long."""
    device = torch.device("cuda")
    full, how = matmul_peak(device, torch.float32, torch.get_num_threads())
    half, _ = matmul_peak(device, torch.bfloat16, torch.get_num_threads())
    assert half > full > 1e11 and "8192 x 8192" in how and PEAK_SECONDS < 1
