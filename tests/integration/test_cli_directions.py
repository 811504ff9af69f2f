"""Languages of a model with tags at the command line: which column of a file is read, which
--langs is refused. The oracle is `score` of two plain files."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mttrain.checkpoint import Index, write_index
from mttrain.cli import main
from mttrain.tokenizer import train_tokenizer
from tests.parity.ct2_help import saved, transformer

Capture = pytest.CaptureFixture[str]
Files = Callable[..., str]
TEXT = {
    "en": ["the house", "a dog", "two men run"],
    "de": ["das Haus", "ein Hund", "zwei Männer rennen"],
    "fr": ["la maison", "un chien", "deux hommes courent"],
}
TAGS = {"2de": "de", "2fr": "fr", "2en": "en"}
DEMO = Path(__file__).resolve().parents[2] / "data" / "demo"


@pytest.fixture(scope="module")
def many(tmp_path_factory: pytest.TempPathFactory) -> str:
    """An untrained model from English, for German, French and back (read-only)."""
    run = tmp_path_factory.mktemp("many")
    lines = [line for text in TEXT.values() for line in text]
    tokenizer = train_tokenizer(lines * 9, vocab_size=290, tags=list(TAGS))
    model = transformer(tokenizer, seed=4)
    checkpoint = saved(run, model, tokenizer, tags=TAGS, untagged=False, decode={"max_length": 9})
    write_index(run, Index().added(checkpoint.name, {"bleu": 1.0}))
    return str(run)


@pytest.fixture
def texts(files: Files) -> dict[str, str]:
    """The same text in three languages: as JSON lines, as TMX, and each as a file of lines."""
    rows = [dict(zip(TEXT, line, strict=True)) for line in zip(*TEXT.values(), strict=True)]
    units = "".join(
        "<tu>"
        + "".join(f'<tuv xml:lang="{k}"><seg>{text}</seg></tuv>' for k, text in row.items())
        + "</tu>"
        for row in rows
    )
    tmx = f'<tmx version="1.4"><header/><body>{units}</body></tmx>'
    return {
        "jsonl": files("v.jsonl", [json.dumps(row) for row in rows]),
        "tmx": files("v.tmx", [tmx]),
        **{lang: files(f"v.{lang}", lines) for lang, lines in TEXT.items()},
    }


def nll(capsys: Capture, command: str, model: str, *options: str) -> float:
    """The likelihood of the targets, which says which text was read."""
    capsys.readouterr()
    arguments = ["--model", model, "--device", "cpu", *options, "--json"]
    assert main([command, *arguments]) == 0, capsys.readouterr().err
    return float(json.loads(capsys.readouterr().out)["nll"])


def refused(capsys: Capture, *arguments: str) -> str:
    """The one sentence that a command refuses this with."""
    capsys.readouterr()
    assert main(list(arguments)) == 2
    return capsys.readouterr().err


@pytest.mark.parametrize("command", ["eval", "score"])
@pytest.mark.parametrize("form", ["jsonl", "tmx"])
def test_the_tag_chooses_the_target(
    command: str, form: str, many: str, texts: dict[str, str], capsys: Capture
) -> None:
    """French output was scored against the German of the same file."""
    for tag in ("2fr", "2de"):
        sides = ["--source", texts["en"], "--target", texts[TAGS[tag]], "--tag", tag]
        wanted = nll(capsys, "score", many, *sides)
        asked = ["--tag", tag, "--pairs", texts[form]]
        for langs in ([], ["--langs", f"en-{TAGS[tag]}"]):
            found = nll(capsys, command, many, *asked, *langs)
            assert found == pytest.approx(wanted, abs=1e-4), (tag, langs)


@pytest.mark.parametrize("command", ["eval", "score"])
def test_other_sources_are_named(
    command: str, many: str, texts: dict[str, str], capsys: Capture
) -> None:
    """A model of many directions was refused those from another source than that of the first; and
    a tag that asks for that source made it both sides of the text."""
    for tag, source in (("2fr", "de"), ("2en", "fr"), ("2en", "de")):
        sides = ["--source", texts[source], "--target", texts[TAGS[tag]], "--tag", tag]
        wanted = nll(capsys, "score", many, *sides)
        langs = ["--langs", f"{source}-{TAGS[tag]}", "--tag", tag]
        for form in ("jsonl", "tmx"):
            found = nll(capsys, command, many, *langs, "--pairs", texts[form])
            assert found == pytest.approx(wanted, abs=1e-4)
    asked = [command, "--model", many, "--tag", "2en", "--pairs"]
    assert "Which languages of " in refused(capsys, *asked, texts["tmx"])
    assert main([*asked, texts["jsonl"]]) == 3
    assert "which of en, de, fr are source and target?" in capsys.readouterr().err


def test_what_contradicts_the_tag(many: str, texts: dict[str, str], capsys: Capture) -> None:
    """References of another language than the tag asks for give scores that mean nothing; and a
    missing tag is told as such."""
    asked = ["eval", "--model", many, "--pairs", texts["tmx"], "--langs"]
    message = "--langs en-de, but with --tag 2fr the model translates into fr."
    assert message in refused(capsys, *asked, "en-de", "--tag", "2fr")
    assert "give --tag NAME, one of 2de, 2fr, 2en" in refused(capsys, *asked, "en-fr")
    assert "--tag 2es is unknown" in refused(capsys, *asked, "en-es", "--tag", "2es")
    test_set = ["eval", "--model", many, "--test-set", "wmt14", "--tag", "2en"]
    assert "Which direction of the test set?" in refused(capsys, *test_set)


def test_samples_belong_to_three_options(texts: dict[str, str], capsys: Capture) -> None:
    """The message left out one of the options that --samples goes with."""
    asked = ["eval", "--hyp", texts["de"], "--ref", texts["de"], "--samples", "9"]
    message = "only with --confidence, --baseline or --tune-length-penalty."
    assert message in refused(capsys, *asked)


# ---- check ------------------------------------------------------------------------------------


def wrong_languages(
    capsys: Capture, config: Path, kinds: tuple[str, ...] = ("language", "swapped")
) -> list[tuple[int, str | None]]:
    """(place of the corpus, side) of all that does not look like its language."""
    capsys.readouterr()
    assert main(["check", "--config", str(config), "--json"]) == 0
    reports = json.loads(capsys.readouterr().out)["texts"]
    return [
        (place, finding["side"])
        for place, report in enumerate(reports)
        for finding in report["findings"]
        if finding["kind"] in kinds
    ]


def configuration(folder: Path, corpora: list[dict[str, Any]]) -> Path:
    """A run from English to German with these corpora; the last one is the validation text."""
    data = {"source_lang": "en", "target_lang": "de", "train": corpora[:-1], "valid": corpora[-1]}
    path = folder / "run.yaml"
    content = {"run_dir": str(folder / "run"), "data": data, "train": {"max_steps": 1}}
    path.write_text(json.dumps(content))  # JSON is YAML
    return path


def test_check_knows_the_languages_of_each_corpus(tmp_path: Path, capsys: Capture) -> None:
    """Each corpus of another direction than the main one brought two warnings of languages that
    the configuration had stated correctly."""
    there = {"source": str(DEMO / "train.en"), "target": str(DEMO / "train.de")}
    back = {"source": there["target"], "target": there["source"]}
    stated = {**back, "source_lang": "de", "target_lang": "en"}
    assert wrong_languages(capsys, configuration(tmp_path, [there, stated, there])) == []
    assert wrong_languages(capsys, configuration(tmp_path, [there, there, stated])) == []
    for corpora, place in (([there, back, there], 1), ([stated, back, there], 1),
                           ([stated, there, back], 2)):  # fmt: skip
        found = wrong_languages(capsys, configuration(tmp_path, corpora), ("language",))
        assert found == [(place, "source"), (place, "target")]
