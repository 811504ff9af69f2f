"""The measuring of large corpora, on small ones."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"
sys.path.insert(0, str(SCRIPTS))

import bench_scale  # noqa: E402
import bench_scale_tasks as tasks  # noqa: E402
from bench_setup import BenchError  # noqa: E402


@pytest.fixture
def few_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tasks, "WORDS", 500)
    monkeypatch.setattr(tasks, "BLOCK", 100)


TEXT = {"pairs": 301, "shards": 2, "vocab": 300}


def test_text_is_a_function_of_the_size(tmp_path: Path, few_words: None) -> None:
    """Figures of two machines, or of two days, are about the same text; packed or not."""
    for name, packed in (("a", False), ("b", False), ("c", True)):
        (tmp_path / name).mkdir()
        tasks.text(tmp_path / name, packed=packed, **TEXT)
    texts = [list(tasks.parallel(tmp_path / name).pairs()) for name in "abc"]
    assert texts[0] == texts[1] == texts[2] and len(texts[0]) == 301
    assert len({pair.source for pair in texts[0]}) == 301  # the shards are not the same
    lengths = [len(pair.source.split()) for pair in texts[0]]
    assert 15 < sum(lengths) / len(lengths) < 30 and max(lengths) > 2 * min(lengths)
    with pytest.raises(BenchError, match="another corpus"):
        tasks.text(tmp_path / "a", packed=False, **{**TEXT, "pairs": 300})


def test_bare_speed_takes_all_blocks_once(
    tmp_path: Path, few_words: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Asked for the whole text, the two halves together are it."""
    monkeypatch.setattr("mttrain.textblocks.PAIRS", 16)
    tasks.text(tmp_path, packed=False, **TEXT)
    from mttrain.tokenizer import Tokenizer

    pair = (Tokenizer.load(tmp_path / "tokenizer.json"),) * 2
    halves = [tasks.bare_speed(tasks.parallel(tmp_path), pair, 10**6, 301, part) for part in (0, 1)]
    assert sum(count for _, count in halves) == 301
    assert all(seconds > 0 and count > 100 for seconds, count in halves)


def test_encodes_and_loads_every_pair(tmp_path: Path, few_words: None) -> None:
    """The whole way once; the loader's task itself refuses a lost pair and a store made again."""
    tasks.text(tmp_path, packed=True, **TEXT)
    made = tasks.encode(tmp_path, bare=100)
    assert made["kept"] == 301 and made["share"] > 0 and made["peak_mb"] > 20
    found = tasks.load(tmp_path, epochs=2, batch_tokens=512, workers=0)
    assert found["batches"] > 10 and len(found["memory_mb"]) == 3
    assert len(found["plan_seconds"]) == 3  # one alone, for its memory


def test_log_of_a_run_that_is_written(tmp_path: Path) -> None:
    """Half a line at the end of a growing log is no record."""
    log = tmp_path / "log.jsonl"
    assert bench_scale.updates(log) == 0
    records = [{"kind": "begin", "step": 0}, {"kind": "train", "step": 1}]
    lines = "".join(json.dumps(record) + "\n" for record in records)
    log.write_text(lines + '{"kind": "train", "step": 2')
    assert bench_scale.updates(log) == 1


def test_tables_have_a_row_for_each_size() -> None:
    size = {
        "text": {"mb": 1.0},
        "encode": {
            "seconds": 2.0, "pairs_per_second": 5.0, "bare_pairs_per_second": 10.0, "share": 0.5,
            "processes": 2, "peak_mb": 300.0, "store_mb": 1.0,
        },
        "load": {
            "open_seconds": 0.1, "plan_seconds": [1.0, 2.0], "plan_peak_mb": 3.0, "batches": 7,
            "pairs_per_second": 9.0, "seconds": 4.0, "memory_mb": [1.0, 2.0],
        },
        "start": {"first_update": 9.0}, "second": {"first_update": 5.0},
        "train": {"memory": [100.0, 101.0, 102.0, 103.0]},
    }  # fmt: skip
    found = bench_scale.tables([{"pairs": 1000, **size}, {"pairs": 10_000, **size}])
    assert "| 10,000 |" in found and "| 50 % " in found and "| 101 103 " in found
    assert "10 times the pairs" in found
