"""Quality of the shipped recipes on real text, from training to score. Minutes to an hour each.

Both tests use the run directories of the recipes and resume what lies there: a finished run is only
translated and scored.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from mttrain.config import load_config
from mttrain.corpus import read_lines, write_lines
from mttrain.metrics import score_corpus
from mttrain.trainer import train
from mttrain.translator import TranslateOptions, Translator

ROOT = Path(__file__).resolve().parents[2]
SHARED = ROOT.parent / "shared"  # scoring as the papers do; not part of the project

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def in_the_repository(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


def outputs_of(recipe: str, source: str) -> list[str]:
    config = load_config(f"configs/{recipe}.yaml")
    result = train(config)
    decode = config.decode
    options = TranslateOptions(beam=decode.beam, length_penalty=decode.length_penalty)
    return Translator.load(result.run_dir).translate(read_lines(source), options)


def test_demo_reaches_95_bleu() -> None:
    """The quick start promises a working translator: test BLEU of at least 95, cased."""
    outputs = outputs_of("demo", "data/demo/test.en")
    (bleu,) = score_corpus(outputs, [list(read_lines("data/demo/test.de"))], metrics=("bleu",))
    assert bleu.value >= 95.0, bleu.text()


def test_multi30k_reaches_40_bleu_as_the_papers_score(tmp_path: Path) -> None:
    """Lower-cased, Moses-tokenised BLEU on test_2016_flickr, from one run of the shipped recipe."""
    scorer = SHARED / "tools" / "score_published.py"
    reference = SHARED / "data" / "multi30k" / "test_2016_flickr.lc.norm.tok.de"
    if not Path("data/multi30k/train.en").exists():
        pytest.skip("no corpus: run scripts/get_multi30k.py")
    if not scorer.exists() or not reference.exists():
        pytest.skip(f"no scoring tool at {scorer}")
    outputs = outputs_of("multi30k_en_de", "data/multi30k/test_2016_flickr.en")
    hypothesis = tmp_path / "hyp.de"
    write_lines(hypothesis, outputs)
    command = [sys.executable, str(scorer), str(hypothesis), str(reference), "--lang", "de"]
    answer = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert float(answer.split("=")[1].split()[0]) >= 40.0, answer
