"""COMET: what is refused without it, and its numbers where the package is installed.

The package wants other versions of numpy and tokenizers than constraints.txt has, so the tests of
the real path run only where somebody has installed it; they make a tiny model with random weights.
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sacrebleu.significance
import yaml

from mttrain import comet_metric
from mttrain.cli import main
from mttrain.errors import CheckpointError, ConfigError, MissingDependency

Capture = pytest.CaptureFixture[str]
Write = Callable[..., str]
INSTALLED = importlib.util.find_spec("comet") is not None
needs_comet = pytest.mark.skipif(not INSTALLED, reason="the package unbabel-comet is not installed")


@pytest.fixture
def pretended(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if the package were there, for what is checked before it is imported."""
    found = importlib.util.find_spec("json")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: found)


def model_folder(folder: Path, **changes: Any) -> Path:
    """The files of a model, without weights."""
    (folder / "checkpoints").mkdir(parents=True)
    (folder / "checkpoints" / "model.ckpt").write_bytes(b"weights")
    values = {"class_identifier": "regression_metric", "pretrained_model": "xlm-roberta-large"}
    (folder / "hparams.yaml").write_text(yaml.safe_dump(values | changes))
    return folder


# ---- what is refused --------------------------------------------------------------------------


@pytest.mark.skipif(INSTALLED, reason="the package unbabel-comet is installed")
def test_missing_package(files: Write, capsys: Capture) -> None:
    """Stops minutes of translating before the package is missed."""
    text = files("a", ["b"])
    arguments = ["eval", "--hyp", text, "--ref", text, "--source", text, "--comet", text]
    assert main(arguments) == 2
    assert "pip install 'mttrain[comet]'" in capsys.readouterr().err


@pytest.mark.usefixtures("pretended")
@pytest.mark.parametrize(
    ("name", "command"),
    [
        ("Unbabel/wmt22-comet-da", "hf download Unbabel/wmt22-comet-da --local-dir wmt22-comet-da"),
        ("wmt22-comet-da", "hf download Unbabel/wmt22-comet-da --local-dir wmt22-comet-da"),
        ("my.org/m_1", "hf download my.org/m_1 --local-dir m_1"),
    ],
)
def test_names_of_a_hub_are_told_how_to_get(name: str, command: str) -> None:
    """Stops a download of gigabytes that nobody asked for, and a bare "not found"."""
    with pytest.raises(ConfigError, match="nothing is downloaded") as caught:
        comet_metric.find_comet(name)
    assert command in str(caught.value)
    with pytest.raises(ConfigError, match="no such file"):
        comet_metric.find_comet("no/such/place")


@pytest.mark.usefixtures("pretended")
def test_places_that_are_no_model(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(CheckpointError, match=r"no checkpoints/model\.ckpt below it"):
        comet_metric.find_comet(str(tmp_path / "empty"))
    lonely = tmp_path / "x" / "checkpoints" / "model.ckpt"
    lonely.parent.mkdir(parents=True)
    lonely.write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"hparams\.yaml"):
        comet_metric.find_comet(str(lonely))
    for content in ("a: [", "- 1", "class_identifier: 5\n", "!!python/object:os.x {}"):
        (tmp_path / "x" / "hparams.yaml").write_text(content)
        with pytest.raises(CheckpointError, match=r"hparams\.yaml"):
            comet_metric.find_comet(str(lonely))


@pytest.mark.usefixtures("pretended")
def test_names_of_models(tmp_path: Path) -> None:
    """Stops a signature that does not tell which model it was."""
    plain = model_folder(tmp_path / "wmt22-comet-da")
    for path in (plain, plain / "checkpoints" / "model.ckpt"):
        found = comet_metric.find_comet(str(path))
        assert (found.name, found.kind) == ("wmt22-comet-da", "regression_metric")
    cached = tmp_path / "models--Unbabel--wmt20-comet-qe-da"
    model_folder(cached / "snapshots" / "abc")
    for path in (cached, cached / "snapshots" / "abc"):
        assert comet_metric.find_comet(str(path)).name == "Unbabel/wmt20-comet-qe-da"
    model_folder(cached / "snapshots" / "def")
    with pytest.raises(CheckpointError, match="2 checkpoints"):
        comet_metric.find_comet(str(cached))


@pytest.mark.usefixtures("pretended")
def test_a_package_that_cannot_be_imported(tmp_path: Path, monkeypatch: Any) -> None:
    """Its dependency torchmetrics wants pkg_resources, which newer setuptools have not."""
    model = comet_metric.find_comet(str(model_folder(tmp_path / "m")))
    monkeypatch.setitem(sys.modules, "comet", None)
    with pytest.raises(MissingDependency, match=r"pip install 'mttrain\[comet\]'"):
        comet_metric.sentence_scores(model, [["a"]], ["b"], ["c"])


def test_comet_needs_the_source(files: Write, capsys: Capture) -> None:
    text = files("a", ["b"])
    assert main(["eval", "--hyp", text, "--ref", text, "--comet", text]) == 2
    assert "--comet judges by the source text too: give --source F." in capsys.readouterr().err
    assert main(["eval", "--hyp", text, "--ref", text, "--source", text]) == 2
    assert "No effect with --hyp" in capsys.readouterr().err


# ---- numbers ----------------------------------------------------------------------------------


def test_interval_and_test_are_sacrebleus_way() -> None:
    """Stops an interval or a p-value that means something else than that of BLEU beside it."""
    generator = np.random.default_rng(1)
    one, noise = generator.random(80), generator.normal(0, 0.02, 80)
    two = one + 0.004 + noise
    score = comet_metric.corpus_score(list(two), "s", bootstrap=500)
    assert score.value == pytest.approx(two.mean())
    rows = np.random.default_rng(12345).integers(80, size=(500, 80))
    means = np.asarray([two[row].mean() for row in rows])
    assert score.ci == pytest.approx(sacrebleu.significance.estimate_ci(means))
    # The normal approximation of the same interval.
    assert score.ci[1] == pytest.approx(1.96 * two.std() / 80**0.5, rel=0.15)
    found = comet_metric.compare(list(one), list(two), "s", samples=500)
    differences = np.abs(means - np.asarray([one[row].mean() for row in rows]))
    real = abs(two.mean() - one.mean())
    p = sacrebleu.significance._compute_p_value(differences - differences.mean(), real)
    assert found.p_value == pytest.approx(p) and found.delta == pytest.approx(real)
    assert comet_metric.compare(list(one), list(one), "s").p_value == 1.0
    clear = comet_metric.compare(list(one), list(one + 0.3), "s")
    assert clear.p_value < 0.01 and "significant" in clear.text()


def test_text_has_four_digits() -> None:
    score = comet_metric.corpus_score([0.85321, 0.85321], "model:m")
    assert score.text() == "COMET|model:m = 0.8532"
    assert score.to_dict()["name"] == "COMET"


# ---- with the package -------------------------------------------------------------------------

MAKE = """
import sys
from pathlib import Path
import pytorch_lightning, torch, yaml
from comet.models import str2model
from tokenizers import Tokenizer, models, pre_tokenizers
from tokenizers.processors import TemplateProcessing
from transformers import XLMRobertaConfig, XLMRobertaTokenizerFast

folder, kind = Path(sys.argv[1]), sys.argv[2]
letters = [chr(code) for code in range(33, 127)] + ["\\u2581", "ä"]
special = ["<s>", "<pad>", "</s>", "<unk>"]
vocabulary = [(s, 0.0) for s in special] + [(c, -5.0) for c in letters] + [("<mask>", 0.0)]
tokenizer = Tokenizer(models.Unigram(vocabulary, unk_id=3))
tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
fast = XLMRobertaTokenizerFast(tokenizer_object=tokenizer)
fast.backend_tokenizer.post_processor = TemplateProcessing(
    single="<s> $A </s>", pair="<s> $A </s> </s> $B </s>", special_tokens=[("<s>", 0), ("</s>", 2)]
)
fast.save_pretrained(folder / "encoder")
XLMRobertaConfig(
    vocab_size=len(vocabulary), hidden_size=16, num_hidden_layers=2, num_attention_heads=2,
    intermediate_size=32, max_position_embeddings=130, pad_token_id=1, bos_token_id=0,
    eos_token_id=2,
).save_pretrained(folder / "encoder")
values = dict(
    encoder_model="XLM-RoBERTa", pretrained_model=str(folder / "encoder"), hidden_sizes=[16, 8],
    layer_transformation="sparsemax", layer_norm=False,
)
(folder / "hparams.yaml").write_text(yaml.safe_dump(values | {"class_identifier": kind}))
torch.manual_seed(1)
model = str2model[kind](**values, load_pretrained_weights=False, local_files_only=True)
(folder / "checkpoints").mkdir()
content = {
    "state_dict": model.state_dict(), "hyper_parameters": values,
    "pytorch-lightning_version": pytorch_lightning.__version__, "epoch": 0, "global_step": 0,
}
torch.save(content, folder / "checkpoints" / "model.ckpt")
"""


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Makes a model of 16 dimensions of the given kind."""

    def make(kind: str) -> Path:
        folder = tmp_path_factory.mktemp("comet") / "tiny"
        folder.mkdir()
        command = [sys.executable, "-W", "ignore", "-c", MAKE, str(folder), kind]
        subprocess.run(command, check=True, capture_output=True)
        return folder

    return make


@needs_comet
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ["regression_metric", "referenceless_regression_metric"])
def test_scores_are_those_of_the_package(
    tiny: Callable[[str], Path], files: Write, capsys: Capture, kind: str
) -> None:
    """The oracle is COMET's own Python interface, one sentence at a time."""
    from comet import load_from_checkpoint

    folder = tiny(kind)
    source, hyps, ref, base = ["a b", "", "zzz"], ["a b", "c", "ä z"], ["a", "d", "z"], ["x"] * 3
    arguments = ["eval", "--source", files("s", source), "--hyp", files("h", hyps)]
    arguments += ["--ref", files("r", ref), "--baseline", files("b", base), "--confidence"]
    arguments += ["--comet", str(folder), "--samples", "50"]
    assert main([*arguments, "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    score, compared = result["scores"][-1], result["comparison"][-1]
    model = load_from_checkpoint(str(folder / "checkpoints/model.ckpt"), local_files_only=True)
    expected = []
    for lines in (hyps, base):
        rows = [{"src": s, "mt": h, "ref": r} for s, h, r in zip(source, lines, ref, strict=True)]
        found = [model.predict([row], gpus=0, progress_bar=False)["scores"][0] for row in rows]
        expected.append(sum(found) / len(found))
    assert score["name"] == "COMET" and score["value"] == pytest.approx(expected[0], abs=1e-5)
    assert score["ci"]["half_width"] >= 0
    assert compared["baseline"] == pytest.approx(expected[1], abs=1e-5)
    assert compared["delta"] == pytest.approx(expected[0] - expected[1], abs=1e-5)
    assert "model:tiny|sha256:" in score["signature"] and f"class:{kind}" in score["signature"]
    assert f"refs:{int(kind == 'regression_metric')}|version:2" in score["signature"]
    assert main(arguments) == 0
    out = capsys.readouterr().out
    assert f"COMET|{score['signature']} = {score['value']:.4f} (μ = " in out
    assert f"COMET|{score['signature']} : baseline" in out


@needs_comet
@pytest.mark.filterwarnings("ignore")
def test_an_encoder_that_is_not_there(
    tiny: Callable[[str], Path], files: Write, capsys: Capture
) -> None:
    """Stops a wait for a network: the message says what is missing and how to get it."""
    folder = tiny("regression_metric")
    text = files("t", ["a"])
    options = ["--source", text, "--hyp", text, "--ref", text, "--comet", str(folder)]
    (folder / "encoder").rename(folder / "away")
    assert main(["eval", *options]) == 4
    assert "is not on this machine, and nothing is downloaded" in capsys.readouterr().err
    (folder / "away").rename(folder / "encoder")
    (folder / "checkpoints" / "model.ckpt").write_bytes(b"no pickle")
    assert main(["eval", *options]) == 4
    assert "cannot load it" in capsys.readouterr().err
