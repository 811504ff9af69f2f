"""What the program that compares ways to train says of figures that are made up."""

from __future__ import annotations

import sys
from pathlib import Path

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"
sys.path.insert(0, str(SCRIPTS))

import bench_ranks  # noqa: E402


def test_every_way_has_the_same_tokens_and_threads(tmp_path: Path) -> None:
    """Twice the tokens of an update for two processes would be called a gain of speed."""
    words = ["--config", "x.yaml", "--batch-tokens", "4000", "--threads", "8", "--processes", "4"]
    arguments = bench_ranks.parsed(words)
    for way in bench_ranks.WAYS:
        command = bench_ranks.command(way, tmp_path, arguments)
        count = 4 if way in ("ddp", "fsdp") else 1
        assert f"train.batch_tokens={4000 // count}" in command
        assert f"threads={8 // count}" in command
        assert ("torch.distributed.run" in command) == (count > 1)


def test_ratios_are_those_of_a_round() -> None:
    """A machine that gets slower from round to round must not make one way slower than another."""
    first = [{"rate": rate, "memory": 10.0} for rate in (100.0, 50.0, 20.0)]
    ddp = [{"rate": rate, "memory": 6.0} for rate in (120.0, 65.0, 22.0)]
    found = bench_ranks.rows({bench_ranks.FIRST: first, "ddp": ddp, "compiled": []})
    assert found[1] == ["ddp", 65, "1.20", "1.10 to 1.30", 6]
    assert [row[0] for row in found] == [bench_ranks.FIRST, "ddp"]
