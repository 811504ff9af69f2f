"""Ctrl-C and SIGTERM: the state is saved, the exit status tells, and the run goes on exactly."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from mttrain.checkpoint import checkpoint_names, load_model
from mttrain.config import dump_config
from mttrain.trainer import train
from tests.integration.training_help import (
    random_sentences,
    tiny_config,
    wait_for_updates,
    write_pairs,
)


@pytest.mark.parametrize(
    ("send", "number", "status"),
    [
        (os.kill, signal.SIGINT, 130),
        (os.kill, signal.SIGTERM, 143),
        (os.killpg, signal.SIGTERM, 143),
    ],
    ids=["INT", "TERM", "TERM to the group"],
)
def test_interrupted_run_is_saved_and_goes_on(
    tmp_path: Path, send: Callable[[int, int], None], number: signal.Signals, status: int
) -> None:
    """R20: no traceback, a non-zero exit, no orphan, no temporary file, and an exact resume. To the
    whole group, as torchrun and Slurm send it, it once ended the loader's worker, and by that the
    run, before the state was saved."""
    lines = random_sentences(80, seed=5)
    data = {
        "train": write_pairs(tmp_path, "train", [(line, line) for line in lines]),
        "valid": write_pairs(tmp_path, "valid", [(line, line) for line in lines[:5]]),
        "workers": 1,
    }
    limits = {"max_steps": 1_000_000, "valid_every": 1_000_000}
    config = tiny_config(tmp_path / "cut", data, train=limits)
    config = config.model_copy(update={"threads": 1})
    path = tmp_path / "run.yaml"
    path.write_text(dump_config(config))
    process = subprocess.Popen(
        [sys.executable, "-m", "mttrain", "train", "--config", str(path)],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    wait_for_updates(Path(config.run_dir) / "log.jsonl", 20)
    send(process.pid, number)
    out, err = process.communicate(timeout=60)
    assert process.returncode == status
    assert out == "" and "Traceback" not in err and f"stopped by {number.name}" in err
    with pytest.raises(ProcessLookupError):
        os.killpg(process.pid, 0)  # no loader worker outlived the run
    (name,) = checkpoint_names(Path(config.run_dir))
    assert not list(Path(config.run_dir).rglob(".tmp-*"))

    step = int(name.removeprefix("step-")) + 5
    limits = {"max_steps": step, "valid_every": 1_000_000}
    runs = []
    for folder in ("cut", "whole"):
        again = tiny_config(tmp_path / folder, data, train=limits)
        runs.append(train(again.model_copy(update={"threads": 1})).run_dir)
    first, second = (
        dict(load_model(run / "checkpoints" / f"step-{step:08d}").model.named_parameters())
        for run in runs
    )
    assert all(torch.equal(first[key], second[key]) for key in first)
