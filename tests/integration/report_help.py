"""Run directories for reports, made in no time: an untrained model and a log written by hand."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from mttrain.config import RunConfig, dump_config, parse_config

PAIRS = [
    ("the small house.", "ein kleines Haus."),
    ("the dog runs.", "ein Hund läuft."),
    ("", ""),
    ("the house.", "ein Haus."),
    ("<script>alert(1)</script> & \u202e the dog", "<img src=x onerror=alert(1)>"),
    ("dog " * 400, "Hund " * 400),
    ("\x1b[31mred\x00 \u2028 dog", "\x07 Hund"),
    ("日本語の長い文です。", "شكرا جزيلا"),
]


def made_run(
    folder: Path, name: str, random_run: Path, *, steps: int = 40, **sections: dict[str, Any]
) -> Path:
    """A run with text, settings, an untrained model and the log of `steps` updates."""
    folder.mkdir(parents=True, exist_ok=True)
    for side, number in (("src", 0), ("tgt", 1)):
        lines = [pair[number] + "\n" for pair in PAIRS]
        (folder / f"text.{side}").write_text("".join(lines), encoding="utf-8", newline="")
    text = {"source": str(folder / "text.src"), "target": str(folder / "text.tgt")}
    values: dict[str, Any] = {
        "run_dir": str(folder / name),
        "data": {"source_lang": "en", "target_lang": "de", "train": text, "valid": text},
        "model": {"d_model": 16, "d_ff": 32, "num_heads": 2, "encoder_layers": 1,
                  "decoder_layers": 1},
        "optim": {"lr": 1e-3},
        "train": {"max_steps": 40, "valid_every": 10},
        "decode": {"beam": 2, "max_length": 12},
    }  # fmt: skip
    for section, settings in sections.items():
        values[section] = {**values.get(section, {}), **settings}
    run = folder / name
    shutil.copytree(random_run, run)
    config = parse_config(values)
    (run / "config.yaml").write_text(dump_config(config), encoding="utf-8")
    write_log(run / "log.jsonl", records(config, steps))
    return run


def write_log(path: Path, entries: list[dict[str, Any]], rest: str = "") -> None:
    lines = [json.dumps(entry, ensure_ascii=False) + "\n" for entry in entries]
    path.write_text("".join(lines) + rest, encoding="utf-8")


def records(config: RunConfig, steps: int) -> list[dict[str, Any]]:
    """What training would have logged: every kind of record, with a loss of nan in between."""
    time = "2026-01-02T03:04:05.678+00:00"
    split = {
        "split": "training", "files": [["a", "b"]], "pairs": 8, "skipped": {"blank": 1}, "kept": 7,
        "lengths": {"source subwords": [3, 5, 6, 7, 8]}, "duplicates": 2, "identical": 0,
        "overlap": 0,
    }  # fmt: skip
    found: list[dict[str, Any]] = [
        {"kind": "corpus", "time": time, "step": 0, "splits": [split], "warnings": ["<b>look</b>"],
         "percentiles": [50, 90, 95, 99, 100]},
        {"kind": "begin", "time": time, "step": 0, "parameters": 12345, "device": "cpu",
         "ranks": 1, "threads": 3, "cpu": "3 CPU threads",
         "config": config.model_dump(mode="json")},
    ]  # fmt: skip
    for step in range(1, steps + 1):
        loss: Any = "nan" if step == 7 else 8 / step
        found.append(
            {"kind": "train", "time": time, "step": step, "epoch": 0, "loss": loss, "nll": loss,
             "lr": step * 1e-5, "grad_norm": 1 / step, "tokens_per_second": 100.0 + step,
             "seconds": step * 2.0}
        )  # fmt: skip
        if step % 10 == 0:
            sample = {"source": "the dog", "output": "der Hund", "reference": "ein Hund <b>"}
            found.append(
                {"kind": "valid", "time": time, "step": step, "bleu": 30 + step / 10, "chrf": 50.0,
                 "nll": 4 / step, "perplexity": "inf" if step == 10 else 1 + 4 / step,
                 "samples": [sample]}
            )  # fmt: skip
    return found
