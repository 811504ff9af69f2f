"""Two gloo processes under torchrun against one process on the same global batches."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from mttrain.checkpoint import load_model
from mttrain.config import dump_config
from mttrain.runlog import read_log
from mttrain.trainer import train
from tests.integration.training_help import random_sentences, tiny_config, write_pairs


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Run directories: one process with accumulate 2, and two processes with accumulate 1."""
    folder = tmp_path_factory.mktemp("ranks")
    lines = random_sentences(61, seed=5)  # an odd number of batches: one rank runs dry
    valid = random_sentences(7, seed=6)
    data = {
        "train": write_pairs(folder, "train", [(line, line) for line in lines]),
        "valid": write_pairs(folder, "valid", [(line, line) for line in valid]),
    }
    settings = {"max_steps": 14, "valid_every": 7, "average": 2}
    one = tiny_config(folder / "one", data, train={**settings, "accumulate": 2})
    one = one.model_copy(update={"threads": 1})
    train(one)
    two = tiny_config(folder / "two", data, train=settings)
    path = folder / "two.yaml"
    path.write_text(dump_config(two))
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
        "-m", "mttrain", "train", "--config", str(path),
    ]  # fmt: skip
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=240,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return Path(one.run_dir), Path(two.run_dir)


def test_same_parameters(both: tuple[Path, Path]) -> None:
    """R18, M09: the gradient is divided by the tokens of all ranks, dropout follows the global
    batch, and a rank without a batch neither hangs nor changes the mean."""
    first, second = (
        dict(load_model(run / "checkpoints" / "step-00000014").model.named_parameters())
        for run in both
    )
    for name, value in first.items():
        torch.testing.assert_close(value, second[name], rtol=1e-3, atol=2e-5)


def test_same_log(both: tuple[Path, Path]) -> None:
    """Losses are sums over all ranks; validation counts every pair once; records appear once."""
    logs = [read_log(run / "log.jsonl") for run in both]
    for kind, keys in (("train", ("loss", "target_tokens", "source_tokens", "lr", "epoch")),
                       ("valid", ("nll", "target_tokens", "chrf"))):  # fmt: skip
        rows = [[record for record in log if record["kind"] == kind] for log in logs]
        assert len(rows[0]) == len(rows[1]) > 1
        for one, two in zip(*rows, strict=True):
            for key in keys:
                assert one[key] == pytest.approx(two[key], rel=1e-4, abs=1e-3), (kind, key)
