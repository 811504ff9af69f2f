"""One corpus in several forms: the same training, the same scores."""

from __future__ import annotations

import gzip
import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from xml.sax.saxutils import escape

import pytest

from mttrain.cli import main
from mttrain.errors import CheckpointError
from mttrain.runlog import read_log
from mttrain.trainer import train
from tests.integration.training_help import random_sentences, tiny_config, write_pairs

Capture = pytest.CaptureFixture[str]
Texts = list[tuple[str, str]]


def tsv(folder: Path, pairs: Texts) -> str:
    path = folder / "text.tsv"
    path.write_text("".join(f"{s}\t{t}\n" for s, t in pairs), encoding="utf-8")
    return str(path)


def jsonl(folder: Path, pairs: Texts) -> str:
    path = folder / "text.jsonl.gz"
    lines = "".join(json.dumps({"yy": t, "xx": s}) + "\n" for s, t in pairs)
    path.write_bytes(gzip.compress(lines.encode()))
    return str(path)


def tmx(folder: Path, pairs: Texts) -> str:
    path = folder / "text.tmx"
    units = "".join(
        f'<tu><tuv xml:lang="yy-ZZ"><seg>{escape(t)}</seg></tuv>'
        f'<tuv xml:lang="xx"><seg>{escape(s)}</seg></tuv></tu>'
        for s, t in pairs
    )
    path.write_text(f'<tmx version="1.4"><header/><body>{units}</body></tmx>', encoding="utf-8")
    return str(path)


FORMS: list[Callable[[Path, Texts], str]] = [tsv, jsonl, tmx]


def weights(run_dir: Path) -> set[str]:
    return {
        hashlib.sha256(path.read_bytes()).hexdigest()
        for path in run_dir.glob("checkpoints/*/model.safetensors")
    }


def test_training_is_the_same_from_every_form(tmp_path: Path) -> None:
    """All forms of a corpus train the same model, vocabulary, skipped pairs and scores included."""
    lines = [*random_sentences(80, seed=1), "", "<&> ü"]
    pairs = [(line, line.upper()) for line in lines]
    two = write_pairs(tmp_path, "train", pairs)
    plain = train(tiny_config(tmp_path / "plain", {"train": two, "valid": two, "test": two}))
    for form in FORMS:
        corpus = {"pairs": form(tmp_path, pairs)}
        data = {"train": corpus, "valid": corpus, "test": corpus}
        config = tiny_config(tmp_path / form.__name__, data)
        other = train(config)
        assert weights(other.run_dir) == weights(plain.run_dir) != set()
        assert [s.value for s in other.scores] == [s.value for s in plain.scores]
        reports = [
            [(r["lines"], r["pairs"], r["skipped"]) for r in read_log(run.run_dir / "log.jsonl")
             if r["kind"] == "encoded"]
            for run in (plain, other)
        ]  # fmt: skip
        assert reports[0] == reports[1] != []
        files = {path: path.stat().st_mtime_ns for path in (other.run_dir / "data").iterdir()}
        train(
            config.model_copy(update={"train": config.train.model_copy(update={"max_steps": 13})})
        )
        for path, time in files.items():
            assert path.stat().st_mtime_ns == time, "resuming finds the same encoded text"


def test_a_changed_file_of_pairs_is_noticed(tmp_path: Path) -> None:
    """R17: resuming over other text changes the plan of the batches."""
    pairs = [(line, line) for line in random_sentences(60, seed=1)]
    corpus = {"pairs": tsv(tmp_path, pairs)}
    data = {"train": corpus, "valid": corpus}
    train(tiny_config(tmp_path, data))
    tsv(tmp_path, pairs[:-1])
    with pytest.raises(CheckpointError, match="text has changed"):
        train(tiny_config(tmp_path, data, train={"max_steps": 20}))


def test_each_reading_of_one_file_is_compared(tmp_path: Path) -> None:
    """Two directions of one file: a change of one language went unnoticed, since the file had one
    sum, that of its last reading (here the validation text's)."""
    lines = random_sentences(60, seed=1)
    path = tmp_path / "all.jsonl"

    def written(third: list[str]) -> None:
        both = zip(lines, third, strict=True)
        path.write_text("".join(json.dumps({"xx": s, "yy": s, "zz": t}) + "\n" for s, t in both))

    written(lines)
    main_one = {"pairs": str(path), "tag": True}
    data = {"train": [main_one, {**main_one, "target_lang": "zz"}], "valid": main_one}
    train(tiny_config(tmp_path, data))
    written([*lines[1:], lines[0]])
    with pytest.raises(CheckpointError, match=r"text has changed.*all\.jsonl"):
        train(tiny_config(tmp_path, data, train={"max_steps": 20}))


def test_missing_files_of_pairs_are_told_at_once(tmp_path: Path, capsys: Capture) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(
        f"run_dir: {tmp_path}/run\ndata:\n  source_lang: xx\n  target_lang: yy\n"
        f"  train: {{pairs: {tmp_path}/no.tmx}}\n  valid: {{pairs: {tmp_path}/no.csv}}\n"
        "train: {max_steps: 1}\n"
    )
    assert main(["train", "--config", str(path)]) == 2
    assert f"data.valid.pairs: '{tmp_path}/no.csv' is none of FILE.tsv" in capsys.readouterr().err
    path.write_text(path.read_text().replace("csv", "tsv"))
    assert main(["train", "--config", str(path)]) == 3
    error = capsys.readouterr().err
    assert f"data.train.pairs: {tmp_path}/no.tmx: no such file" in error
    assert f"data.valid.pairs: {tmp_path}/no.tsv: no such file" in error


# ---- eval --------------------------------------------------------------------------------------

PAIRS = [("the small house", "ein kleines Haus"), ("dog runs", "Hund läuft")]


def scores(capsys: Capture, *arguments: str) -> list[float]:
    assert main(["eval", *arguments, "--json"]) == 0
    return [score["value"] for score in json.loads(capsys.readouterr().out)["scores"]]


def test_eval_of_pairs_is_that_of_two_files(
    tmp_path: Path, random_run: Path, capsys: Capture
) -> None:
    two = write_pairs(tmp_path, "test", PAIRS)
    table = tsv(tmp_path, PAIRS)
    model = ["--model", str(random_run)]
    plain = scores(capsys, *model, "--source", two["source"], "--ref", two["target"])
    assert scores(capsys, *model, "--pairs", table) == plain
    turned = write_pairs(tmp_path, "turned", [(t, s) for s, t in PAIRS])
    other = scores(capsys, *model, "--source", turned["source"], "--ref", turned["target"])
    assert scores(capsys, *model, "--pairs", table, "--fields", "2,1") == other != plain
    plain = scores(capsys, "--hyp", two["source"], "--ref", two["target"])
    assert scores(capsys, "--hyp", two["source"], "--pairs", table) == plain


def test_eval_finds_the_languages_of_its_model(
    tmp_path: Path, random_run: Path, capsys: Capture
) -> None:
    memory = Path(tmx(tmp_path, PAIRS))
    memory.write_text(memory.read_text().replace("xx", "en-US").replace("yy-ZZ", "de"))
    found = scores(capsys, "--model", str(random_run), "--pairs", str(memory))
    assert found == scores(capsys, "--model", str(random_run), "--pairs", tsv(tmp_path, PAIRS))


def test_eval_of_a_public_test_set(
    tmp_path: Path, random_run: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    from sacrebleu.dataset import DATASETS

    data = DATASETS["wmt14"]
    monkeypatch.setattr(data, "_outdir", str(tmp_path))
    for field in data.fieldnames("en-de"):
        Path(data._get_txt_file_path("en-de", field)).touch()
    two = write_pairs(tmp_path, "test", PAIRS)
    for side, field in (("source", "src"), ("target", "ref")):
        text = Path(two[side]).read_text(encoding="utf-8")
        Path(data._get_txt_file_path("en-de", field)).write_text(text, encoding="utf-8")
    model = ["--model", str(random_run)]
    plain = scores(capsys, *model, "--source", two["source"], "--ref", two["target"])
    assert scores(capsys, *model, "--test-set", "wmt14") == plain
    assert scores(capsys, *model, "--pairs", "sacrebleu:wmt14") == plain
    hyp = ["--hyp", two["target"], "--test-set", "wmt14"]
    assert scores(capsys, *hyp, "--langs", "en-de")[1] == pytest.approx(100)  # chrF
    assert (
        main(["eval", "--hyp", two["target"], "--pairs", tsv(tmp_path, PAIRS), "--langs", "en-zh"])
        == 0
    )
    assert "BLEU tokenizer: zh (target language zh)" in capsys.readouterr().err
    assert main(["eval", *hyp]) == 2
    assert "such as --langs en-de" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--pairs", "{t}", "--ref", "{t}"], "No effect with --pairs: --ref."),
        (["--pairs", "{t}", "--test-set", "wmt14"], "No effect with --pairs: --test-set."),
        (["--ref", "{t}", "--langs", "en-de"], "No effect without --pairs or --test-set: --langs."),
        (["--pairs", "{t}", "--fields", "1"], "write A,B"),
        (["--pairs", "{t}", "--fields", "1,de"], "two names or two numbers; write A,B"),
        (["--pairs", "{t}.tmx"], "no such file"),
        (["--pairs", "{m}"], "such as --langs en-de"),
        (["--pairs", "{m}", "--langs", "en"], "--langs en: write source and target"),
        (["--test-set", "wmt14", "--fields", "1,2"], "--fields has no effect with --test-set"),
        (["--pairs", "{t}", "--output", "{t}"], "--output"),
    ],
)
def test_wrong_options_of_eval(
    tmp_path: Path, capsys: Capture, arguments: list[str], message: str
) -> None:
    names = {"t": tsv(tmp_path, PAIRS), "m": tmx(tmp_path, PAIRS)}
    status = main(["eval", "--hyp", names["t"], *(word.format(**names) for word in arguments)])
    assert status in (2, 3)
    assert message in capsys.readouterr().err


def test_a_direction_that_is_not_the_models(
    tmp_path: Path, random_run: Path, capsys: Capture
) -> None:
    arguments = ["--model", str(random_run), "--pairs", tmx(tmp_path, PAIRS), "--langs", "de-en"]
    assert main(["eval", *arguments]) == 2
    assert "--langs de-en, but the model is for en-de." in capsys.readouterr().err
