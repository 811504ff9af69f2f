"""Two gloo processes under torchrun against one process on the same global batches."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from mttrain.checkpoint import load_model
from mttrain.config import dump_config, load_config
from mttrain.runlog import read_log
from mttrain.trainer import train
from tests.integration.training_help import random_sentences, tiny_config, write_pairs
from tests.system.compare_help import differences

STEPS = 40

# `mttrain train`, and a look at what is left of it: an object of torch's that still held the
# process group would keep its threads, which abort the process when they outlive the interpreter.
# The first start asks torchrun to stop, and goes on when it is told by it.
RANK = """
import gc, os, signal, sys, time
import mttrain.loop
from torch.nn.parallel import DistributedDataParallel
from mttrain.cli import main

plain = mttrain.loop.Trainer._update

def stopped_on_the_way(self, *arguments):
    if os.environ.get("STOP") and self.world.is_main and self.progress.update == 7:
        os.kill(os.getppid(), signal.SIGTERM)
        while not self.interrupt.signal:
            time.sleep(0.05)
    plain(self, *arguments)

mttrain.loop.Trainer._update = stopped_on_the_way
status = main(["train", "--config", sys.argv[1]])
gc.disable()
left = [type(o).__name__ for o in gc.get_objects() if isinstance(o, DistributedDataParallel)]
sys.exit(f"still there: {left}" if left else status)
"""


def launch(path: Path, stop: str = "") -> subprocess.Popen[str]:
    """Two ranks of `mttrain train` under torchrun."""
    script = path.with_name("rank.py")
    script.write_text(RANK)
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
        str(script), str(path),
    ]  # fmt: skip
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "STOP": stop}
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    )


def finish(process: subprocess.Popen[str]) -> str:
    """Wait for the job; what it said on stderr."""
    err = process.communicate(timeout=240)[1]
    assert process.returncode == 0, err[-3000:]
    return err


def corpus(folder: Path) -> dict[str, Any]:
    """61 pairs, so an odd number of batches: one rank runs dry; a validation line far beyond the
    256 prepared positions, on one rank only, and fewer validation lines than a window."""
    lines = random_sentences(61, seed=5)
    valid = [*random_sentences(6, seed=6), " ".join(random_sentences(60, seed=7))]
    return {
        "train": write_pairs(folder, "train", [(line, line) for line in lines]),
        "valid": write_pairs(folder, "valid", [(line, line) for line in valid]),
    }


def parameters(run: Path, step: int) -> dict[str, torch.Tensor]:
    return dict(load_model(run / "checkpoints" / f"step-{step:08d}").model.named_parameters())


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Run directories: one process with accumulate 2, and two processes with accumulate 1, which
    were stopped by SIGTERM on the way and started again."""
    folder = tmp_path_factory.mktemp("ranks")
    data = corpus(folder)
    settings = {"max_steps": STEPS, "valid_every": STEPS // 2, "average": 2, "log_every": 7}
    one = tiny_config(folder / "one", data, train={**settings, "accumulate": 2})
    train(one.model_copy(update={"threads": 1}))
    two = tiny_config(folder / "two", data, train=settings)
    path = folder / "two.yaml"
    path.write_text(dump_config(two))
    process = launch(path, stop="yes")
    err = process.communicate(timeout=240)[1]
    assert process.returncode != 0 and "stopped by SIGTERM" in err
    assert "resuming after update" in finish(launch(path))
    return Path(one.run_dir), Path(two.run_dir)


def test_same_parameters(both: tuple[Path, Path]) -> None:
    """R18, M09, R20: the gradient is divided by the tokens of all ranks, dropout follows the global
    batch, and neither a rank without a batch, nor a position table grown on one rank only, nor a
    stop in between changes the result."""
    first, second = (parameters(run, STEPS) for run in both)
    for name, value in first.items():
        torch.testing.assert_close(value, second[name], rtol=1e-2, atol=1e-4)


def test_same_log(both: tuple[Path, Path]) -> None:
    """R26: losses are sums over all ranks; validation counts every pair once; no record is there
    twice or missing after the stop."""
    logs = [read_log(run / "log.jsonl") for run in both]
    for kind, keys in (("train", ("step", "loss", "target_tokens", "source_tokens", "lr", "epoch")),
                       ("valid", ("step", "nll", "target_tokens"))):  # fmt: skip
        rows = [[record for record in log if record["kind"] == kind] for log in logs]
        assert len(rows[0]) == len(rows[1]) > 1
        for one, two in zip(*rows, strict=True):
            for key in keys:
                assert one[key] == pytest.approx(two[key], rel=1e-3, abs=1e-3), (kind, key)


@pytest.mark.slow
def test_stopped_job_equals_the_uninterrupted_one(both: tuple[Path, Path], tmp_path: Path) -> None:
    """D08, R02, R14, R18: two processes that were stopped and started again, to the bit."""
    config = load_config(both[1] / "config.yaml")
    path = tmp_path / "whole.yaml"
    path.write_text(dump_config(config.model_copy(update={"run_dir": str(tmp_path / "run")})))
    finish(launch(path))
    assert differences(both[1], tmp_path / "run", STEPS) == []
