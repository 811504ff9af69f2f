"""The dry run: what it says against what training then does, and that it leaves nothing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mttrain import autobatch
from mttrain.cli import main
from mttrain.config import RunConfig, dump_config
from mttrain.rehearsal import PROBE_UPDATES, Timed, estimate, in_words
from mttrain.runlog import read_log
from mttrain.trainer import train
from tests.integration.training_help import random_sentences, tiny_config, write_pairs

Capture = pytest.CaptureFixture[str]


def prepared(folder: Path, count: int = 300, **train: Any) -> RunConfig:
    """300 pairs, of which one is blank and two are too long."""
    lines = random_sentences(count, seed=3)
    long = " ".join(random_sentences(40, seed=9))
    pairs = [*((line, line) for line in lines), ("ba be", ""), (long, "ba"), (long, "be")]
    data = {
        "train": write_pairs(folder, "train", pairs),
        "valid": write_pairs(folder, "valid", pairs[:5]),
    }
    return tiny_config(folder, data, train=train)


def dry_run(config: RunConfig, folder: Path, capsys: Capture) -> tuple[dict[str, Any], str]:
    path = folder / "run.yaml"
    path.write_text(dump_config(config))
    assert main(["train", "--config", str(path), "--dry-run", "--json"]) == 0
    out, err = capsys.readouterr()
    found: dict[str, Any] = json.loads(out)
    return found, err


def files(folder: Path) -> dict[str, bytes]:
    return {str(p): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def test_says_what_training_does(tmp_path: Path, capsys: Capture) -> None:
    """Parameters, batches, padding, FLOPs and dropped pairs are those of the run; nothing is left,
    and a run that is there already is not touched and trains on as without it."""
    config = prepared(tmp_path, max_steps=None, max_epochs=1)
    found, err = dry_run(config, tmp_path, capsys)
    assert not Path(config.run_dir).exists()
    result = train(config)
    records = read_log(result.run_dir / "log.jsonl")
    kinds = {record["kind"]: record for record in records}
    assert found["estimate"]["parameters"] == kinds["begin"]["parameters"]
    assert found["epoch"]["padding"] == pytest.approx(kinds["epoch"]["padding"], abs=1e-4)
    updates = [record for record in records if record["kind"] == "train"]
    assert found["epoch"]["updates_per_epoch"] == len(updates)
    flops = sum(record["flops"] for record in updates)
    assert found["estimate"]["flops_per_epoch"] == flops
    tokens = sum(record["target_tokens"] for record in updates)
    assert found["estimate"]["flops_per_token"] == round(flops / tokens)
    assert found["encoded"]["skipped"] == kinds["encoded"]["skipped"]
    counts = {reason: skipped["count"] for reason, skipped in found["encoded"]["skipped"].items()}
    assert sum(counts.values()) == 3 and len([n for n in counts.values() if n]) == 2
    assert found["estimate"]["probe_updates"] == PROBE_UPDATES - 2
    assert 0 < found["estimate"]["seconds_left"] == found["estimate"]["epoch_seconds"]
    for part in ("parameters", "model FLOPs", "memory, estimated", "an epoch takes", "skipped"):
        assert part in err
    before = files(tmp_path)
    longer = config.model_copy(update={"train": config.train.model_copy(update={"max_epochs": 2})})
    found, err = dry_run(longer, tmp_path, capsys)
    before[str(tmp_path / "run.yaml")] = (tmp_path / "run.yaml").read_bytes()
    assert files(tmp_path) == before
    assert found["estimate"]["updates_done"] == len(updates)
    left = found["estimate"]["seconds_left"] / found["estimate"]["epoch_seconds"]
    assert left == pytest.approx(1.0, abs=0.05) and f"from update {len(updates)} on" in err


def test_tries_auto(tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    """The batch that would be taken, found anew by each dry run, since it keeps nothing."""
    monkeypatch.setattr(autobatch, "_SECONDS", 0.0)
    config = prepared(tmp_path, count=1500, batch_tokens="auto")
    found, err = dry_run(config, tmp_path, capsys)
    assert f"train.batch_tokens auto: {found['batch_tokens']}, by speed" in err
    assert found["batch_tokens"] in (512, 1024) and not Path(config.run_dir).exists()


def test_under_torchrun(tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    """One process speaks for all: an epoch has half of the updates where two processes train."""
    config = prepared(tmp_path)
    alone, _ = dry_run(config, tmp_path, capsys)
    monkeypatch.setenv("WORLD_SIZE", "2")
    both, err = dry_run(config, tmp_path, capsys)
    batches = both["epoch"]["batches"]
    assert both["epoch"]["updates_per_epoch"] == -(-batches // 2)
    assert alone["epoch"]["updates_per_epoch"] == batches == alone["epoch"]["batches"]
    assert both["estimate"]["processes"] == 2 and "processes say" in err
    monkeypatch.setenv("RANK", "1")
    train(config, dry_run=True)
    assert capsys.readouterr().err == ""


def test_times_by_hand(tmp_path: Path) -> None:
    """Two updates that prepare kernels are left out; the nearest limit ends training."""
    config = prepared(tmp_path, count=5, max_steps=1000, max_epochs=3, max_time="1h")
    probe = [Timed(9.0, 1e9, 0.5), Timed(5.0, 1e9, 0.5), Timed(2.0, 1e9, 0.0), Timed(4.0, 2e9, 0.5)]
    found = estimate(config.train, probe, 100e9, 50, 20)
    assert found["epoch_seconds"] == 200.0 and found["flops_per_second"] == 5e8
    assert (found["limit"], found["seconds_left"]) == ("max_epochs", 200 / 50 * (3 * 50 - 20))
    assert found["waiting"] == round(0.5 * 4 / 6, 4)
    found = estimate(config.train, probe[:1], 100e9, 50, 145)
    assert (found["probe_updates"], found["epoch_seconds"]) == (1, 900.0)
    assert found["seconds_left"] == 900 / 50 * 5
    found = estimate(config.train, probe, 1e14, 50, 0)
    assert (found["limit"], found["seconds_left"]) == ("max_time", 3600.0)
    assert estimate(config.train, [], 1e14, 50, 0)["epoch_seconds"] is None


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (3.21, "3.2 s"), (59.2, "1 min 0 s"), (200, "3 min 20 s"), (3599.5, "1 h 0 min"),
        (18_600, "5 h 10 min"), (187_300, "2 days 4 h"),
    ],
)  # fmt: skip
def test_time_in_words(seconds: float, text: str) -> None:
    assert in_words(seconds) == text
