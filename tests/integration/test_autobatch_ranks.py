"""`train.batch_tokens: auto` on two gloo processes, whose clocks do not agree."""

from __future__ import annotations

from pathlib import Path

from mttrain.config import load_config
from mttrain.runlog import read_log
from tests.integration.ranks_help import finish_ranks
from tests.integration.training_help import random_sentences, tiny_config, write_pairs

# Each process finds another size the faster one: only what they agree on lets both plan the same.
BEFORE = """
import itertools, time
from mttrain import autobatch, dataset

mine = os.environ["RANK"] == "1"
speeds = {512: 1e6, 1024: 2e6 if mine else 9e5}
autobatch._Probe.turns = lambda probe, tokens, turn: itertools.repeat(speeds[tokens])
autobatch._SECONDS = 0.0
collate = dataset.collate

def slow(examples):
    time.sleep(0.3)
    return collate(examples)

if mine:
    dataset.collate = slow
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
    finish_ranks(tmp_path / "ranks", [config], before=BEFORE)
    records = read_log(Path(config.run_dir) / "log.jsonl")
    found = [record for record in records if record["kind"] == "batch_tokens"]
    assert len(found) == 1 and found[0]["batch_tokens"] == 1024
    assert found[0]["trials"] == [[512, 2e6], [1024, 2.9e6]]
    assert load_config(Path(config.run_dir) / "config.yaml").train.batch_tokens == 1024
    begin = next(record for record in records if record["kind"] == "begin")
    assert begin["ranks"] == 2 and begin["peak_flops"] > 0
    assert all(r["waiting"] > 0.3 for r in records if r["kind"] == "train")
