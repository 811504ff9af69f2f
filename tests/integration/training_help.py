"""Tiny corpora and configurations for tests that train."""

from __future__ import annotations

import random
import time
from pathlib import Path
from typing import Any

from mttrain.config import RunConfig, parse_config
from mttrain.runlog import read_log

WORDS = [f"{a}{b}" for a in "bdfgklmnprst" for b in "aeiou"]  # 60 two-letter words


def write_pairs(folder: Path, name: str, pairs: list[tuple[str, str]]) -> dict[str, str]:
    """Two text files of a split; the section of a configuration that names them."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = {"source": str(folder / f"{name}.src"), "target": str(folder / f"{name}.tgt")}
    for side, path in enumerate(paths.values()):
        Path(path).write_text("".join(pair[side] + "\n" for pair in pairs), encoding="utf-8")
    return paths


def random_sentences(
    count: int, seed: int, shortest: int = 1, longest: int = 8, words: int = len(WORDS)
) -> list[str]:
    """Lines of random words: of the first `words` in the list, `shortest` to `longest` of them."""
    chooser = random.Random(seed)
    return [
        " ".join(chooser.choices(WORDS[:words], k=chooser.randint(shortest, longest)))
        for _ in range(count)
    ]


def tiny_config(folder: Path, data: dict[str, Any], **sections: dict[str, Any]) -> RunConfig:
    """A two-layer model that trains in a second; `sections` are laid over the defaults."""
    values: dict[str, Any] = {
        "run_dir": str(folder / "run"),
        "data": {"source_lang": "xx", "target_lang": "yy", "max_length": 64, **data},
        "tokenizer": {"vocab_size": 330},
        "model": {
            "d_model": 32, "d_ff": 64, "num_heads": 4, "encoder_layers": 1, "decoder_layers": 1,
            "dropout": 0.1, "norm": "pre",
        },
        "optim": {"lr": 3e-3, "warmup_steps": 5},
        "train": {
            "batch_tokens": 200, "max_steps": 12, "valid_every": 6, "average": 0, "device": "cpu",
            "log_every": 1,
        },
        "decode": {"beam": 2},
    }  # fmt: skip
    for name, settings in sections.items():
        values[name] = {**values.get(name, {}), **settings}
    return parse_config(values)


def wait_for_updates(path: Path, count: int) -> None:
    """Return when the log of a running training holds `count` records of updates."""
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        if path.exists() and sum(r["kind"] == "train" for r in read_log(path)) >= count:
            return
        time.sleep(0.1)
    raise AssertionError(f"no {count} updates in {path}")
