"""`eval --tune-length-penalty` at the command line, held against `translate` and `eval --hyp`; and
`eval` of outputs chosen among candidates, held against `translate` with the same options."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mttrain.checkpoint import Index, write_index
from mttrain.cli import main
from mttrain.config import load_config
from mttrain.runsetup import write_config
from mttrain.tokenizer import train_tokenizer
from tests.parity.ct2_help import saved, sentences, transformer

Capture = pytest.CaptureFixture[str]
Files = Callable[..., str]
LINES = sentences(25, 12, seed=5)
DECODE = {"beam": 4, "length_penalty": 0.6, "max_length": 15}


def make_run(folder: Path, seed: int = 1, **meta: Any) -> Path:
    """A run with a random model whose outputs hang on source and length penalty; its test set is
    the first 20 of LINES."""
    tokenizer = train_tokenizer(sentences(200, 20), vocab_size=300)
    (folder / "test.txt").write_text("".join(f"{line}\n" for line in LINES[:20]))
    side, test = "{source: a.en, target: a.de}", f"{folder}/test.txt"
    data = f"{{source_lang: en, target_lang: de, train: {side}, valid: {side}"
    config = folder / "run.yaml"
    config.write_text(
        f"run_dir: {folder}\ndata: {data}, test: {{source: {test}, target: {test}}}}}\n"
        "train: {max_steps: 1}\n"
    )
    checkpoint = saved(folder, transformer(tokenizer, seed=seed), tokenizer, decode=DECODE, **meta)
    write_index(folder, Index().added(checkpoint.name, {"bleu": 1.0}))
    write_config(load_config(str(config)))
    return folder


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_run(tmp_path_factory.mktemp("run"))


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With the same vocabulary and other weights, of the reverse direction if that is asked for."""
    return make_run(tmp_path_factory.mktemp("other"), seed=2)


def evaluated(capsys: Capture, *arguments: str, status: int = 0) -> tuple[str, str]:
    """What `eval` prints and says."""
    capsys.readouterr()
    assert main(["eval", *arguments]) == status
    captured = capsys.readouterr()
    return captured.out, captured.err


def scores(capsys: Capture, *arguments: str) -> dict[str, float]:
    out, _ = evaluated(capsys, *arguments, "--json")
    return {score["name"]: score["value"] for score in json.loads(out)["scores"]}


def translated(run: Path, source: str, output: Path, *options: str) -> str:
    arguments = ["--model", str(run), "--input", source, "--output", str(output)]
    assert main(["translate", *arguments, *options, "--device", "cpu"]) == 0
    return str(output)


def asked(run: Path, source: str, ref: str, *options: str) -> list[str]:
    """The arguments; words of few letters have no 4-grams, so BLEU counts letters."""
    model = ["--model", str(run), "--source", source, "--ref", ref, "--device", "cpu"]
    return [*model, "--tune-length-penalty", "--tokenize", "char", *options]


ENGINES = [[], ["--split-long"], ["--precision", "int8"], ["--engine", "ctranslate2"], ["ensemble"]]


@pytest.mark.parametrize("how", ENGINES, ids=lambda how: how[-1] if how else "plain")
def test_each_row_is_translate_and_eval(
    run: Path, other: Path, files: Files, capsys: Capture, tmp_path: Path, how: list[str]
) -> None:
    """Stops a row of the table from being anything but what `translate --length-penalty A` and
    `eval --hyp` give, to the last digit."""
    if "ctranslate2" in how:
        pytest.importorskip("ctranslate2")
    how = ["--model", str(other)] if how == ["ensemble"] else how
    source = files("src", LINES)
    ref = translated(run, source, tmp_path / "ref", "--length-penalty", "1.7", *how)
    out, _ = evaluated(capsys, *asked(run, source, ref, *how, "--json"))
    found = json.loads(out)
    tuning = found["tuning"]
    assert tuning["present"] == found["decoding"]["length_penalty"] == 0.6
    table = {row["length_penalty"]: row for row in tuning["table"]}
    assert list(table) == sorted(table) and {0.0, 0.2, 1.6, 2.0} < set(table)
    assert len({row["bleu"] for row in table.values()}) > 1, "a table of nothing"
    for penalty in (0.0, 0.6, tuning["best"], 2.0):
        options = ("--length-penalty", repr(penalty), *how)
        hyp = translated(run, source, tmp_path / "hyp", *options)
        apart = scores(capsys, "--hyp", hyp, "--ref", ref, "--tokenize", "char")
        row = table[penalty]
        assert (row["bleu"], row["chrf"]) == (apart["BLEU"], apart["chrF"])
        letters = [len("".join(Path(name).read_text().split())) for name in (hyp, ref)]
        assert row["length_ratio"] == pytest.approx(letters[0] / letters[1], abs=1e-3)
    # The reference is the very output of 1.7, which nothing can beat.
    assert table[tuning["best"]]["bleu"] == max(row["bleu"] for row in table.values())
    assert table[1.6]["bleu"] <= table[tuning["best"]]["bleu"] == pytest.approx(100)
    compared = tuning["comparison"]
    assert compared["baseline"] == table[0.6]["bleu"] and compared["system"] == pytest.approx(100)


def test_table_is_that_of_json(run: Path, files: Files, capsys: Capture, tmp_path: Path) -> None:
    """Stops the two forms from telling different things; and says how to use the best value."""
    source = files("src", LINES)
    ref = translated(run, source, tmp_path / "ref", "--length-penalty", "0.3")
    out, _ = evaluated(capsys, *asked(run, source, ref, "--tune-metric", "chrf", "--json"))
    found = json.loads(out)
    tuning = found["tuning"]
    assert tuning["metric"] == "chrf" and tuning["comparison"]["name"] == "chrF"
    out, err = evaluated(capsys, *asked(run, source, ref, "--tune-metric", "chrf"))
    head, *lines = out.splitlines()
    assert head.split() == ["length", "penalty", "BLEU", "chrF2", "hyp/ref"]
    for row, line in zip(tuning["table"], lines, strict=False):
        penalty, bleu, chrf, ratio, *marks = line.replace(",", "").split()
        assert (float(penalty), bleu) == (row["length_penalty"], f"{row['bleu']:.2f}")
        assert (chrf, ratio) == (f"{row['chrf']:.2f}", f"{row['length_ratio']:.3f}")
        assert marks == [w for w in ("best", "present") if tuning[w] == row["length_penalty"]]
    signatures = [f"BLEU|{found['signatures']['BLEU']}", f"chrF2|{found['signatures']['chrF']}"]
    *_, bleu, chrf, compared = lines
    assert [bleu, chrf] == signatures and compared.startswith("chrF2|") and "p = " in compared
    best = f"{tuning['best']:g}"
    assert f"The best length penalty is {best}; the present one is 0.6." in err
    assert f"decode.length_penalty: {best} in" in err and f"--length-penalty {best} with" in err


def test_nothing_better_than_the_present(
    run: Path, files: Files, capsys: Capture, tmp_path: Path
) -> None:
    """Stops a change from being advised where the present value cannot be beaten."""
    source = files("src", LINES)
    ref = translated(run, source, tmp_path / "ref")
    out, err = evaluated(capsys, *asked(run, source, ref))
    assert "best, present" in out and "p = " not in out
    assert "No other value scores higher than the present length penalty 0.6: keep it." in err


def test_samples_are_those_of_the_comparison(
    run: Path, files: Files, capsys: Capture, tmp_path: Path
) -> None:
    """Stops --samples from being dropped."""
    source = files("src", LINES)
    ref = translated(run, source, tmp_path / "ref", "--length-penalty", "1.7")
    out, _ = evaluated(capsys, *asked(run, source, ref, "--samples", "50"))
    assert "|bs:50|" in out.splitlines()[-1]


def test_warns_of_the_test_set(run: Path, files: Files, capsys: Capture) -> None:
    """Stops a penalty from being tuned on the text that is to judge it, under another name, as a
    part, or with a checkpoint instead of the run; other text gets no warning."""
    (checkpoint,) = (run / "checkpoints").glob("step-*")
    part = files("part", LINES[:10])
    for model in (run, checkpoint):
        _, err = evaluated(capsys, *asked(model, part, part))
        assert f"warning: 10 of 10 lines are in the test set of {model}:" in err
    more = files("more", [*LINES[:5], *sentences(9, 9, seed=77)])
    _, err = evaluated(capsys, *asked(run, more, more))
    assert "test set" not in err
    text, aside = run / "test.txt", run / "aside"
    text.rename(aside)
    _, err = evaluated(capsys, *asked(run, part, part))
    aside.rename(text)
    assert f"The test set of {run} cannot be read" in err and "test.txt" in err


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--beam", "1"], "--beam 1 is greedy search, which finds one output"),
        (["--length-penalty", "1"], "No effect with --tune-length-penalty: --length-penalty."),
        (["--sample", "--seed", "3"], "No effect with --tune-length-penalty: --sample, --seed."),
        (["--confidence"], "No effect with --tune-length-penalty: --confidence."),
        (["--output", "x"], "No effect with --tune-length-penalty: --output."),
        (["--baseline", "{t}"], "No effect with --tune-length-penalty: --baseline."),
        (["--mbr", "chrf"], "No effect with --tune-length-penalty: --mbr."),
        (["--tune-metric", "ter"], "--tune-metric"),
    ],
)
def test_refused(run: Path, files: Files, capsys: Capture, options: list[str], words: str) -> None:
    """Stops an option from being dropped in silence."""
    text = files("text", LINES[:2])
    arguments = asked(run, text, text, *(word.format(t=text) for word in options))
    out, err = evaluated(capsys, *arguments, status=2)
    assert words in err and not out


def test_refused_without_a_search(run: Path, files: Files, capsys: Capture, tmp_path: Path) -> None:
    """The same for translations that are there already, and a model whose search is greedy."""
    text = files("text", LINES[:2])
    hyp = ["--hyp", text, "--ref", text]
    _, err = evaluated(capsys, *hyp, "--tune-length-penalty", status=2)
    assert "No effect with --hyp, which is translated already: --tune-length-penalty." in err
    _, err = evaluated(capsys, *hyp, "--tune-metric", "chrf", status=2)
    assert "--tune-metric has an effect only with --tune-length-penalty." in err
    _, err = evaluated(capsys, *hyp, "--mbr", "chrf", status=2)
    assert "No effect with --hyp, which is translated already: --mbr." in err
    greedy = make_run(tmp_path)
    tokenizer = train_tokenizer(sentences(200, 20), vocab_size=300)
    saved(greedy, transformer(tokenizer), tokenizer, decode={**DECODE, "beam": 1})
    _, err = evaluated(capsys, *asked(greedy, text, text), status=2)
    assert "decode.beam: 1 of the model is greedy search" in err
    empty = files("empty", [])
    _, err = evaluated(capsys, *asked(run, empty, empty), status=3)
    assert "There are no lines to score" in err


# ---- outputs chosen among candidates ------------------------------------------------------------

CHOICES = [
    ["--mbr", "chrf"],
    ["--mbr", "bleu", "--candidates", "3"],
    ["--mbr", "chrf", "--sample", "--seed", "3", "--candidates", "8"],
    ["--rerank", "{other}"],
    ["--rerank", "{other}", "--rerank-weight", "2.5", "--beam", "6", "--length-penalty", "1"],
]


@pytest.mark.parametrize("options", CHOICES, ids=" ".join)
def test_eval_of_a_choice_is_that_of_translate(
    run: Path, other: Path, files: Files, capsys: Capture, tmp_path: Path, options: list[str]
) -> None:
    """Stops `eval` from scoring the first candidate while it says that another was chosen."""
    options = [word.format(other=other) for word in options]
    source, ref = files("src", LINES), files("ref", LINES[::-1])
    hyp = translated(run, source, tmp_path / "hyp", *options)
    apart = scores(capsys, "--hyp", hyp, "--ref", ref, "--tokenize", "char")
    model = ["--model", str(run), "--source", source, "--ref", ref, "--device", "cpu"]
    kept = tmp_path / "kept"
    arguments = [*model, "--tokenize", "char", *options, "--output", str(kept)]
    assert scores(capsys, *arguments) == apart
    assert kept.read_bytes() == Path(hyp).read_bytes()
    best = translated(run, source, tmp_path / "best")
    assert kept.read_bytes() != Path(best).read_bytes(), "the choice changed nothing"


def test_how_it_was_chosen_is_told(run: Path, other: Path, files: Files, capsys: Capture) -> None:
    """Stops a score from standing there without what made it."""
    text = files("text", LINES[:3])
    model = ["--model", str(run), "--source", text, "--ref", text, "--device", "cpu"]
    _, err = evaluated(capsys, *model, "--mbr", "chrf")
    assert "beam 4, length penalty 0.6, of 4 candidates by MBR with chrf; at most" in err
    _, err = evaluated(capsys, *model, "--rerank", str(other), "--candidates", "3")
    assert f"of 3 candidates by the scores of {other}, too; at most" in err
    out, _ = evaluated(capsys, *model, "--rerank", str(other), "--rerank-weight", "2", "--json")
    decoding = json.loads(out)["decoding"]
    assert decoding["rerank"] == [str(other)] and decoding["rerank_weight"] == [2.0]
    out, _ = evaluated(capsys, *model, "--mbr", "bleu", "--candidates", "3", "--json")
    decoding = json.loads(out)["decoding"]
    assert (decoding["mbr"], decoding["candidates"], decoding["nbest"]) == ("bleu", 3, 3)
    out, _ = evaluated(capsys, *model, "--json")
    assert not {"mbr", "candidates", "rerank", "rerank_weight"} & set(json.loads(out)["decoding"])
    _, err = evaluated(capsys, *model, "--candidates", "3", status=2)
    assert "--candidates has an effect only together with --mbr or --rerank." in err
