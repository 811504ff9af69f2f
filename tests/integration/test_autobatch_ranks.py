"""`train.batch_tokens: auto` on two gloo processes, whose clocks do not agree."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from mttrain.config import dump_config, load_config
from mttrain.runlog import read_log
from tests.integration.training_help import random_sentences, tiny_config, write_pairs

# Each process finds another size the faster one: only what they agree on lets both plan the same.
RANK = """
import itertools, os, sys, time
from mttrain import autobatch, dataset
from mttrain.cli import main
rank = int(os.environ["RANK"])
speeds = {512: 1e6, 1024: (9e5, 2e6)[rank]}
autobatch._Probe.turns = lambda probe, tokens, turn: itertools.repeat(speeds[tokens])
autobatch._SECONDS = 0.0
plain = dataset.collate
def slow(examples):
    time.sleep(0.3)
    return plain(examples)
if rank == 1:
    dataset.collate = slow
sys.exit(main(["train", "--config", sys.argv[1]]))
"""


def test_all_processes_take_the_same_batch(tmp_path: Path) -> None:
    """Processes with batches of their own wait for each other for ever, or train on other sums. One
    waits for its data, all wait for it, and the log of the first said that nobody did."""
    lines = random_sentences(5000, seed=3)
    data = {
        "train": write_pairs(tmp_path, "train", [(line, line) for line in lines]),
        "valid": write_pairs(tmp_path, "valid", [(line, line) for line in lines[:5]]),
    }
    config = tiny_config(tmp_path, data, train={"batch_tokens": "auto", "max_steps": 6})
    path, script = tmp_path / "run.yaml", tmp_path / "rank.py"
    path.write_text(dump_config(config))
    script.write_text(RANK)
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
        str(script), str(path),
    ]  # fmt: skip
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    records = read_log(Path(config.run_dir) / "log.jsonl")
    found = [record for record in records if record["kind"] == "batch_tokens"]
    assert len(found) == 1 and found[0]["batch_tokens"] == 1024
    assert found[0]["trials"] == [[512, 2e6], [1024, 2.9e6]]
    assert load_config(Path(config.run_dir) / "config.yaml").train.batch_tokens == 1024
    begin = next(record for record in records if record["kind"] == "begin")
    assert begin["ranks"] == 2 and begin["peak_flops"] > 0
    assert all(r["waiting"] > 0.3 for r in records if r["kind"] == "train")
