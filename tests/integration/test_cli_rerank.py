"""`translate --mbr` and `translate --rerank`: the oracles are the list that `translate --nbest`
prints, sacreBLEU, and `mttrain score`."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from sacrebleu.metrics.bleu import BLEU
from sacrebleu.metrics.chrf import CHRF

from mttrain.cli import main

Capture = pytest.CaptureFixture[str]
Files = Callable[..., str]
SOURCES = ["the small house.", " ", "a dog", "ein kleines Haus."]
LISTS = {  # how candidates are found
    "beam": ["--beam", "4", "--max-length", "8", "--min-length", "3"],
    "sample": ["--sample", "--seed", "3", "--max-length", "8", "--min-length", "3"],
}
COUNTS = {"beam": 4, "sample": 6}


@pytest.fixture(scope="module")
def back_run(random_run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An untrained model from German to English, with another vocabulary (read-only)."""
    import torch

    from mttrain.checkpoint import Index, save_checkpoint, write_index
    from mttrain.config import ModelConfig
    from mttrain.model import Transformer
    from mttrain.tokenizer import train_tokenizer

    run = tmp_path_factory.mktemp("back_run")
    tokenizer = train_tokenizer(["das kleine Haus", "the house"] * 9, vocab_size=270)
    config = ModelConfig(
        d_model=16, d_ff=32, num_heads=2, encoder_layers=1, decoder_layers=1, dropout=0.0
    )
    with torch.random.fork_rng():
        torch.manual_seed(8)
        model = Transformer(config, tokenizer.size, tokenizer.size)
    meta = {"source_lang": "de", "target_lang": "en", "max_length": 64}
    path = save_checkpoint(run, 1, model, meta, (tokenizer, tokenizer), None)
    write_index(run, Index().added(path.name, {"bleu": 1.0}))
    return run


def translate(run: Path, capsys: Capture, *options: str) -> list[str]:
    """The lines on stdout; random models also write what str.splitlines takes for line ends."""
    assert main(["translate", "--model", str(run), "--device", "cpu", *options]) == 0
    return capsys.readouterr().out.split("\n")[:-1]


def objects(run: Path, capsys: Capture, *options: str) -> list[dict[str, Any]]:
    return [json.loads(x) for x in translate(run, capsys, "--format", "jsonl", *options)]


def candidates(run: Path, capsys: Capture, kind: str, path: str) -> list[list[dict[str, Any]]]:
    """The list of each line that the search itself gives; [] for a blank line."""
    options = [*LISTS[kind], "--nbest", str(COUNTS[kind]), "--input", path]
    found = objects(run, capsys, *options)
    return [[] if "blank" in item["flags"] else item["hypotheses"] for item in found]


@pytest.mark.parametrize("kind", list(LISTS))
@pytest.mark.parametrize("utility", ["chrf", "bleu"])
def test_mbr_prints_the_best_of_the_list(
    kind: str, utility: str, random_run: Path, files: Files, capsys: Capture
) -> None:
    """Stops --mbr from other candidates than the search's, from weighing draws like a list or a
    list like draws, and a blank line from losing its place."""
    path = files("source", SOURCES)
    metric: Any = CHRF() if utility == "chrf" else BLEU(effective_order=True)
    best, expected = [], []
    for found in candidates(random_run, capsys, kind, path):
        # What was cut has no end: beside others it weighs nothing in a list, and it comes last.
        ended = [h for h in found if h["finished"]]
        heavy = found if kind == "sample" or not ended else ended
        shares = [1.0 if kind == "sample" else math.exp(h["score"]) for h in heavy]
        values = [
            sum(
                share * metric.sentence_score(h["text"], [other["text"]]).score
                for share, other in zip(shares, heavy, strict=True)
            )
            / sum(shares)
            for h in found
        ]
        order = sorted(
            range(len(found)),
            key=lambda i: (not found[i]["finished"], -round(values[i], 9), -found[i]["score"]),
        )
        best.append([found[i]["text"] for i in order])
        expected.append([values[i] for i in order])
    options = [*LISTS[kind], "--mbr", utility, "--input", path]
    if kind == "sample":
        options += ["--candidates", "6"]
    assert translate(random_run, capsys, *options) == [x[0] if x else "" for x in best]
    rows = [x.split(" ||| ") for x in translate(random_run, capsys, *options, "--nbest", "2")]
    wanted = [["0", x] for x in best[0][:2]] + [["1", ""]] + [["2", x] for x in best[2][:2]]
    assert [row[:2] for row in rows][:5] == wanted
    for item, texts, values in zip(
        objects(random_run, capsys, *options, "--nbest", "4"), best, expected, strict=True
    ):
        if not texts:
            assert item["flags"] == ["blank"] and "utility" not in item
            continue
        assert [h["text"] for h in item["hypotheses"]] == texts[:4]
        assert [h["utility"] for h in item["hypotheses"]] == pytest.approx(values[:4], abs=1e-6)
        assert item["utility"] == item["hypotheses"][0]["utility"]


def mean_scores(run: Path, pairs: list[tuple[str, str]], files: Files, capsys: Capture) -> Any:
    """What `mttrain score` prints of the pairs: the sums and the numbers of tokens."""
    sides = [files("left", [a for a, _ in pairs]), files("right", [b for _, b in pairs])]
    arguments = ["--source", sides[0], "--target", sides[1], "--format", "jsonl"]
    assert main(["score", "--model", str(run), "--device", "cpu", *arguments]) == 0
    rows = [json.loads(x) for x in capsys.readouterr().out.split("\n")[:-1]]
    return [(row["score"], row["tokens"]) for row in rows]


@pytest.mark.parametrize("kind", list(LISTS))
def test_rerank_adds_what_score_says(
    kind: str, random_run: Path, back_run: Path, files: Files, capsys: Capture
) -> None:
    """Both directions together: stops a model from judging the wrong side, a weight from the wrong
    place, and other candidates than those of the search. The length penalty is the saved 0.5."""
    path = files("source", SOURCES)
    lists = candidates(random_run, capsys, kind, path)
    flat = [(line, h) for line, found in zip(SOURCES, lists, strict=True) for h in found]
    assert all(h["text"].strip() for _, h in flat)  # a blank source has no score
    there = mean_scores(random_run, [(x, h["text"]) for x, h in flat], files, capsys)
    home = mean_scores(back_run, [(h["text"], x) for x, h in flat], files, capsys)
    for (_, h), *scores in zip(flat, there, home, strict=True):
        h["each"] = [total / tokens**0.5 for total, tokens in scores]
        h["sum"] = h["ranked"] + 3 * h["each"][0] + 0.25 * h["each"][1]
    options = [*LISTS[kind], "--input", path, "--nbest", "3"]
    options += ["--rerank", str(random_run), "--rerank", str(back_run)]
    options += ["--rerank-weight", "3", "--rerank-weight", "0.25"]
    if kind == "sample":
        options += ["--candidates", "6"]
    for item, found in zip(objects(random_run, capsys, *options), lists, strict=True):
        if not found:
            assert item["flags"] == ["blank"] and "reranked" not in item
            continue
        order = sorted(found, key=lambda h: (not h["finished"], -h["sum"]))
        for new, old in zip(item["hypotheses"], order, strict=False):
            assert (new["text"], new["ids"]) == (old["text"], old["ids"])
            assert (new["score"], new["ranked"]) == (old["score"], old["ranked"])
            assert new["reranked"] == pytest.approx(old["sum"], abs=1e-5)
            assert new["rerank_scores"] == pytest.approx(old["each"], abs=1e-5)
        assert len(item["hypotheses"]) == 3


def test_what_a_reranker_cuts_is_told(
    random_run: Path, back_run: Path, files: Files, capsys: Capture
) -> None:
    """A judge that read the beginning of a line gave its score of the whole without a word."""
    path = files("source", ["a dog", "the dog " * 600])
    options = [*LISTS["beam"], "--rerank", str(random_run), "--rerank", str(back_run)]
    arguments = ["--model", str(random_run), "--device", "cpu", "--input", path, *options]
    assert main(["translate", *arguments]) == 0
    err = capsys.readouterr().err
    assert (
        err.count("beyond the limit of a reranking model; it judged what was left: line 2\n") == 1
    )


def test_one_weight_is_for_all_and_1_is_the_default(
    random_run: Path, back_run: Path, files: Files, capsys: Capture
) -> None:
    """A weight that reached only the first of several models would go unseen."""
    path = files("source", SOURCES)
    options = [*LISTS["beam"], "--input", path]
    models = ["--rerank", str(random_run), "--rerank", str(back_run)]
    for weights, number in (([], 1.0), (["--rerank-weight", "2"], 2.0)):
        for item in objects(random_run, capsys, *options, *models, *weights):
            if "blank" not in item["flags"]:
                total = item["ranked"] + number * sum(item["rerank_scores"])
                assert item["reranked"] == pytest.approx(total, abs=1e-9)


def test_scores_stay_those_of_the_model(
    random_run: Path, back_run: Path, files: Files, capsys: Capture
) -> None:
    """--scores prints what the model said of the text, whoever chose it; and the summary tells of
    the texts that were chosen."""
    path = files("source", SOURCES)
    rows = translate(random_run, capsys, *LISTS["beam"], "--nbest", "4", "--input", path)
    for choice in (["--mbr", "chrf"], ["--mbr", "bleu"], ["--rerank", str(back_run)]):
        options = [*LISTS["beam"], *choice, "--input", path]
        chosen = translate(random_run, capsys, *options, "--scores")
        assert len(chosen) == len(SOURCES) and set(chosen) <= set(rows)


@pytest.mark.parametrize("choice", [["--mbr", "bleu"], ["--rerank", "BACK"]], ids=" ".join)
def test_batches_change_nothing(
    choice: list[str], random_run: Path, back_run: Path, files: Files, capsys: Capture
) -> None:
    """Lines one by one, as when somebody types them, and batches that hold a few of the draws."""
    choice = [str(back_run) if word == "BACK" else word for word in choice]
    path = files("source", [*SOURCES, *SOURCES[::-1]])
    options = [*LISTS["sample"], "--candidates", "5", *choice, "--input", path]
    whole = translate(random_run, capsys, *options)
    for batching in (["--batch-size", "1"], ["--batch-tokens", "60"]):
        assert translate(random_run, capsys, *options, *batching) == whole


def test_numbers_of_candidates(random_run: Path, files: Files, capsys: Capture) -> None:
    """Without --candidates: the beam, here that of the run; 32 draws. What is written stays with
    --nbest."""
    path = files("source", SOURCES[:1])
    limits = ["--max-length", "4", "--input", path]
    assert len(translate(random_run, capsys, "--mbr", "chrf", *limits)) == 1
    assert len(translate(random_run, capsys, "--mbr", "chrf", "--nbest", "2", *limits)) == 2
    for options in (["--mbr", "chrf"], ["--rerank", str(random_run)]):
        found = translate(random_run, capsys, *options, "--sample", "--nbest", "32", *limits)
        drawn = translate(random_run, capsys, "--sample", "--nbest", "32", *limits)
        assert found != drawn and sorted(found) == sorted(drawn)


REFUSED: list[tuple[list[str], str]] = [
    (["--candidates", "4"], "--candidates has an effect only together with --mbr or --rerank."),
    (["--rerank-weight", "2"], "--rerank-weight has an effect only together with --rerank."),
    (["--mbr", "bleu", "--rerank-weight", "2"], "--rerank-weight has an effect only together"),
    (["--mbr", "chrf", "--rerank", "BACK"], "--mbr and --rerank both decide the order"),
    (["--mbr", "chrf", "--beam", "1"], "--mbr chooses among several outputs, and greedy"),
    (["--rerank", "BACK", "--beam", "1"], "--rerank chooses among several outputs, and greedy"),
    (["--mbr", "chrf", "--split-long"], "--mbr needs several outputs for a whole line"),
    (["--rerank", "BACK", "--split-long"], "--rerank needs several outputs for a whole line"),
    (["--mbr", "chrf", "--beam", "4", "--candidates", "5"], "is more than --beam 4 can give"),
    (["--mbr", "chrf", "--candidates", "1"], "--candidates is 1; it must be 2 or more."),
    (["--mbr", "chrf", "--beam", "4", "--candidates", "0"], "--candidates is 0; it must be 2"),
    (["--mbr", "chrf", "--sample", "--nbest", "33"], "--nbest 33 is more than the 32 candidates"),
    (["--rerank", "BACK", "--rerank-weight", "-1"], "--rerank-weight is -1; it must be above 0."),
    (["--rerank", "BACK", "--rerank-weight", "nan"], "--rerank-weight is nan; it must be above 0."),
    (["--rerank", "BACK", *["--rerank-weight", "1"] * 2], "stands there 2 times, but --rerank 1;"),
    (["--rerank", "OTHER"], "is a model for de-fr; to rerank en-de it must translate en-de or de-"),
    (["--rerank", "BACK", "--tag", "2de"], "was trained without tags: --tag has no effect"),
    (["--mbr", "chrf", "--sample", "--engine", "ctranslate2"], "--sample does not work with CTr"),
]  # fmt: skip


@pytest.mark.parametrize(("options", "message"), REFUSED, ids=[" ".join(x) for x, _ in REFUSED])
def test_what_is_refused(
    options: list[str],
    message: str,
    random_run: Path,
    back_run: Path,
    tmp_path: Path,
    files: Files,
    capsys: Capture,
) -> None:
    """Options without effect, lists that are none, models of other languages: told in one line,
    before a word is translated."""
    other = tmp_path / "other"
    shutil.copytree(back_run, other)
    (meta,) = other.glob("checkpoints/*/meta.json")
    content = json.loads(meta.read_text(encoding="utf-8"))
    meta.write_text(json.dumps({**content, "target_lang": "fr"}), encoding="utf-8")
    paths = {"BACK": str(back_run), "OTHER": str(other)}
    words = [paths.get(word, word) for word in options]
    path, output = files("source", SOURCES), tmp_path / "out"
    arguments = ["--model", str(random_run), "--input", path, "--output", str(output), *words]
    assert main(["translate", *arguments]) == 2
    out, err = capsys.readouterr()
    assert out == "" and message in err and len(err.splitlines()) == 1 and not output.exists()


def test_a_missing_reranker(random_run: Path, files: Files, capsys: Capture) -> None:
    """Told before the first model works."""
    path = files("source", SOURCES)
    arguments = ["--model", str(random_run), "--input", path, "--rerank", "nowhere"]
    assert main(["translate", *arguments]) == 4
    assert capsys.readouterr().err.startswith("error: nowhere does not exist")
