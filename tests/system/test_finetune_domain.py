"""A trained model is adapted to a domain that it has never seen, with and without its old text.

Three short trainings and six scores: some minutes of two quiet cores.
"""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from mttrain.config import load_config, parse_config
from mttrain.corpus import read_lines
from mttrain.metrics import score_corpus
from mttrain.runlog import read_log
from mttrain.trainer import train
from mttrain.translator import TranslateOptions, Translator

ROOT = Path(__file__).resolve().parents[2]
DEMO = ROOT / "data" / "demo"
FIRST_UPDATES = 800
ALONE_UPDATES, MIXED_UPDATES = 300, 600  # a third of the mixed text is new

pytestmark = pytest.mark.slow


@dataclass(frozen=True)
class Bleu:
    """Test scores of one model."""

    old: float
    new: float


def corpus(folder: Path, part: str, **more: Any) -> dict[str, Any]:
    return {"source": str(folder / f"{part}.en"), "target": str(folder / f"{part}.de"), **more}


def bleu(run: Path, folder: Path) -> float:
    """Cased BLEU of the translations of a test set, with the settings of configs/demo.yaml."""
    sources, references = (list(read_lines(folder / f"test.{side}")) for side in ("en", "de"))
    options = TranslateOptions(beam=5, length_penalty=1.0)
    outputs = Translator.load(run).translate(sources, options)
    (score,) = score_corpus(outputs, [references], metrics=("bleu",))
    return score.value


@pytest.fixture(scope="module")
def domain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The corpus of the other domain."""
    folder = tmp_path_factory.mktemp("software")
    script = ROOT / "scripts" / "make_demo_corpus.py"
    command = [sys.executable, str(script), "--domain", "software", "--output", str(folder)]
    subprocess.run(command, check=True)
    return folder


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of the demo, of fewer updates."""
    run = tmp_path_factory.mktemp("first") / "run"
    short = [f"train.max_steps={FIRST_UPDATES}", f"train.valid_every={FIRST_UPDATES // 2}"]
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(ROOT)
        return train(load_config("configs/demo.yaml", [f"run_dir={run}", *short])).run_dir


def adapted(first: Path, domain: Path, folder: Path, mixed: bool) -> Path:
    """The model of `first` after some more updates on the new domain, as docs/recipes.md has it."""
    text = [corpus(domain, "train")]
    if mixed:
        text = [corpus(domain, "train", weight=3), corpus(DEMO, "train", weight=0.6)]
    config = {
        "run_dir": str(folder / "run"),
        "data": {
            "source_lang": "en",
            "target_lang": "de",
            "train": text,
            "valid": corpus(domain, "valid"),
        },
        "optim": {"lr": 2e-3, "schedule": "linear", "warmup_steps": 20},
        "train": {
            "init_from": str(first),
            "batch_tokens": 1024,
            "max_steps": MIXED_UPDATES if mixed else ALONE_UPDATES,
            "valid_every": 100,
            "average": 0,
        },
    }
    return train(parse_config(config)).run_dir


def test_learning_a_domain_and_forgetting(first: Path, domain: Path, tmp_path: Path) -> None:
    """Fine-tuning that does not begin with the old weights learns the new domain as slowly as a new
    model does; weights of corpora that have no effect would let the old domain be forgotten."""
    runs = {"first": first}
    for name in ("alone", "mixed"):
        runs[name] = adapted(first, domain, tmp_path / name, mixed=name == "mixed")
    scores = {name: Bleu(bleu(run, DEMO), bleu(run, domain)) for name, run in runs.items()}
    print(scores)
    before, alone, mixed = scores["first"], scores["alone"], scores["mixed"]
    assert before.old > 80 and before.new < 30
    assert min(alone.new, mixed.new) > before.new + 30
    assert mixed.old > before.old - 1.5
    assert alone.old < mixed.old - 20
    start = next(r for r in read_log(runs["mixed"] / "log.jsonl") if r["kind"] == "valid")
    assert start["step"] == 0 and start["bleu"] < 30
