"""The dry run: what it says against what training then does, and that it leaves nothing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mttrain import autobatch, rehearsal
from mttrain.cli import main
from mttrain.config import RunConfig, dump_config
from mttrain.loop import Trainer
from mttrain.progress import Progress
from mttrain.rehearsal import PROBE_UPDATES, estimate, in_words
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


def test_says_what_training_does(
    tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Parameters, batches, padding, FLOPs and dropped pairs are those of the run; nothing is left,
    and a run that is there already is not touched and trains on as without it."""
    monkeypatch.setattr(rehearsal, "PROBE_SECONDS", 1e9)  # a busy machine makes all of the updates
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
    assert files(tmp_path) == before and found["encoded"]["reused"]
    assert found["estimate"]["updates_done"] == len(updates)
    left = found["estimate"]["seconds_left"] / found["estimate"]["epoch_seconds"]
    assert left == pytest.approx(1.0, abs=0.05) and f"from update {len(updates)} on" in err


def test_text_is_encoded_once(
    tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A dry run threw away what it had encoded. A cache keeps it for the start; that of a run is
    read, and never written to, not even where it is damaged or the cache lies in it."""
    monkeypatch.setattr(rehearsal, "PROBE_UPDATES", 3)
    config = prepared(tmp_path, count=50, max_steps=1, valid_every=1)
    cached = with_cache(config, tmp_path / "cache")
    assert not dry_run(cached, tmp_path, capsys)[0]["encoded"]["reused"]
    assert not Path(config.run_dir).exists()
    assert dry_run(cached, tmp_path, capsys)[0]["encoded"]["reused"]
    inside = with_cache(config, Path(config.run_dir) / "cache")
    assert not dry_run(inside, tmp_path, capsys)[0]["encoded"]["reused"]
    assert not Path(config.run_dir).exists()
    monkeypatch.undo()
    for started in (cached, inside):
        result = train(started, fresh=True)
        records = {record["kind"]: record for record in read_log(result.run_dir / "log.jsonl")}
        assert records["encoded"]["reused"] == (started is cached)
    for data in (Path(config.run_dir) / "cache", tmp_path / "cache"):
        assert len(list(data.glob("train-*.json"))) == 1
    (path,) = (Path(config.run_dir) / "cache").glob("train-*.source.tokens")
    (path.parent / f"{path.name.split('.')[0]}.lock").touch()
    before = files(Path(config.run_dir))
    assert dry_run(inside, tmp_path, capsys)[0]["encoded"]["reused"]
    path.write_bytes(path.read_bytes()[:-1] + b"\xff")
    before[str(path)] = path.read_bytes()
    assert not dry_run(inside, tmp_path, capsys)[0]["encoded"]["reused"]
    assert files(Path(config.run_dir)) == before


def with_cache(config: RunConfig, folder: Path) -> RunConfig:
    data = config.data.model_copy(update={"cache_dir": str(folder)})
    return config.model_copy(update={"data": data})


def test_memory_is_that_of_a_process(
    tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The estimate was that of one process alone: a model was called too large that eight share.
    One that a single device cannot hold is not tried, and the rest is said all the same."""
    monkeypatch.setattr(rehearsal, "PROBE_UPDATES", 3)
    config = prepared(tmp_path)
    alone, _ = dry_run(config, tmp_path, capsys)
    count = alone["estimate"]["parameters"]
    assert alone["memory"]["weights"] == 4 * count
    again = {"parallel": "fsdp", "activation_checkpointing": True}
    train_config = config.train.model_copy(update=again)
    monkeypatch.setenv("WORLD_SIZE", "3")
    shared, err = dry_run(config.model_copy(update={"train": train_config}), tmp_path, capsys)
    assert shared["memory"]["weights"] == shared["memory"]["gradients"] == 4 * -(-count // 3)
    assert shared["memory"]["activations"] < alone["memory"]["activations"]
    assert "memory on each process, estimated" in err and shared["estimate"]["probe_updates"] > 0
    monkeypatch.setattr(rehearsal, "free_memory", lambda device: 0)
    untried, err = dry_run(config.model_copy(update={"train": train_config}), tmp_path, capsys)
    assert "has no room for the whole model" in err
    assert untried["estimate"]["epoch_seconds"] is None
    assert untried["estimate"]["flops_per_epoch"] == alone["estimate"]["flops_per_epoch"]
    assert dry_run(config, tmp_path, capsys)[0]["estimate"]["probe_updates"] > 0


def test_tries_auto(tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    """The batch that would be taken, found anew by each dry run, since it keeps nothing."""
    monkeypatch.setattr(autobatch, "_SECONDS", 0.0)
    monkeypatch.setattr(rehearsal, "PROBE_UPDATES", 3)
    config = prepared(tmp_path, count=2500, batch_tokens="auto")
    found, err = dry_run(config, tmp_path, capsys)
    assert f"train.batch_tokens auto: {found['batch_tokens']}, by speed" in err
    assert found["batch_tokens"] in (512, 1024) and not Path(config.run_dir).exists()


def test_auto_counts_what_an_epoch_holds(
    tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For eight processes, and of a corpus of which an epoch has an eighth, the batch was that of
    one process and of the whole corpus: an epoch had one update."""
    monkeypatch.setattr(rehearsal, "PROBE_UPDATES", 3)
    config = prepared(tmp_path, count=2500, batch_tokens="auto")
    corpora = [config.data.train[0].model_copy(update={"weight": 0.125})]
    less = config.model_copy(update={"data": config.data.model_copy(update={"train": corpora})})
    said = "train.batch_tokens auto: 512, by the size of the corpus"
    assert said in dry_run(less, tmp_path, capsys)[1]
    monkeypatch.setenv("WORLD_SIZE", "8")
    assert said in dry_run(config, tmp_path, capsys)[1]


def test_first_updates_may_take_long(
    tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compiling took all the time of the probe: its one update was the estimate."""
    plain = Trainer._update

    def slow(self: Trainer, *arguments: Any) -> None:
        plain(self, *arguments)
        if self.progress.update == 1:
            self._lap -= 1e6  # as if that had taken days

    monkeypatch.setattr(Trainer, "_update", slow)
    found, _ = dry_run(prepared(tmp_path), tmp_path, capsys)
    assert found["estimate"]["probe_updates"] > 1


def test_under_torchrun(tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    """One process speaks for all: an epoch has half of the updates where two processes train."""
    monkeypatch.setattr(rehearsal, "PROBE_UPDATES", 3)
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
    times = (9.0, 1e9, 0.5), (5.0, 1e9, 0.5), (2.0, 1e9, 0.0), (4.0, 2e9, 0.5)
    probe = [
        {"flops": flops, "flops_per_second": flops / seconds, "waiting": share}
        for seconds, flops, share in times
    ]
    found = estimate(config.train, probe, 100e9, 50, Progress(update=20))
    assert found["epoch_seconds"] == 200.0 and found["flops_per_second"] == 5e8
    assert (found["limit"], found["seconds_left"]) == ("max_epochs", 200 / 50 * (3 * 50 - 20))
    assert found["waiting"] == round(0.5 * 4 / 6, 4)
    found = estimate(config.train, probe[:1], 100e9, 50, Progress(update=145))
    assert (found["probe_updates"], found["epoch_seconds"]) == (1, 900.0)
    assert found["seconds_left"] == 900 / 50 * 5
    found = estimate(config.train, probe, 1e14, 50, Progress(elapsed=600.0))
    assert (found["limit"], found["seconds_left"]) == ("max_time", 3000.0)
    assert estimate(config.train, [], 1e14, 50, Progress())["epoch_seconds"] is None


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (3.21, "3.2 s"), (59.2, "1 min 0 s"), (200, "3 min 20 s"), (3599.5, "1 h 0 min"),
        (18_600, "5 h 10 min"), (187_300, "2 days 4 h"),
    ],
)  # fmt: skip
def test_time_in_words(seconds: float, text: str) -> None:
    assert in_words(seconds) == text
