"""`translate`, `eval`, `tokenize` and `encode` at the command line: the edges of their input, what
they print about it, and that a printed score is the model's own."""

from __future__ import annotations

import io
import json
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mttrain.cli import main
from mttrain.tokenizer import EOS_ID, Tokenizer, train_tokenizer
from mttrain.translator import Translator

Capture = pytest.CaptureFixture[str]
Files = Callable[..., str]
SOURCES = ["the small house.", "a dog", "läuft", "the dog runs", "ein kleines Haus."]


def translate(run: Path, *options: str) -> int:
    return main(["translate", "--model", str(run), "--device", "cpu", *options])


def type_in(monkeypatch: pytest.MonkeyPatch, text: bytes) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text)))


def rows_of(capsys: Capture) -> list[str]:
    """The lines on stdout; random models also write what str.splitlines takes for line ends."""
    return capsys.readouterr().out.split("\n")[:-1]


def long_line(tokenizer: Tokenizer, words: str, limit: int) -> tuple[str, str]:
    """A line far longer than `limit` (EOS included), and the text of what is read of it."""
    line = f"{words} " * 40
    ids = tokenizer.encode(line)[: limit - 1]
    kept = tokenizer.decode(ids)
    assert tokenizer.encode(kept) == ids
    return line, kept


# ---- input at its edges -------------------------------------------------------------------------


@pytest.mark.parametrize("beam", ["1", "5"])
@pytest.mark.parametrize("batch", ["1", "8"])
def test_an_empty_line_stays_in_place(
    beam: str, batch: str, random_run: Path, monkeypatch: Any, capsys: Capture
) -> None:
    """T08: an empty line was translated into an invented sentence, or was skipped, so that all
    later lines moved up."""
    alone = []
    for text in (b"Hello .\n", b"Bye .\n"):
        type_in(monkeypatch, text)
        assert translate(random_run, "--beam", beam) == 0
        alone.append(capsys.readouterr().out)
    type_in(monkeypatch, b"Hello .\n\nBye .\n")
    assert translate(random_run, "--beam", beam, "--batch-size", batch) == 0
    out, err = capsys.readouterr()
    assert out == f"{alone[0]}\n{alone[1]}" and out.count("\n") == 3
    assert err.startswith("3 lines, 1 of them blank")


@pytest.mark.parametrize(
    "options",
    [[], ["--scores"], ["--nbest", "2"], ["--format", "jsonl"], ["--batch-size", "1"]],
    ids=str,
)
def test_an_empty_file_gives_an_empty_file(
    options: list[str], random_run: Path, files: Files, capsys: Capture, tmp_path: Path
) -> None:
    """T08, E06: no lines in, no bytes out, and that is no error."""
    empty, output = files("empty", b""), tmp_path / "out"
    assert translate(random_run, "--input", empty, "--output", str(output), *options) == 0
    assert output.read_bytes() == b""
    assert translate(random_run, "--input", empty, *options) == 0
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("0 lines, in ")


def test_only_blank_lines(random_run: Path, files: Files, capsys: Capture) -> None:
    """T08: with nothing to translate every layout still has its line or its entry per line."""
    path = files("blank", ["", " \t", "\u3000"])
    assert translate(random_run, "--input", path) == 0
    assert capsys.readouterr().out == "\n\n\n"
    for options in (["--nbest", "2"], ["--scores"]):
        assert translate(random_run, "--input", path, *options) == 0
        rows = rows_of(capsys)
        assert rows == [f"{i} |||  ||| 0.000000 ||| 0.000000" for i in range(3)]
    assert translate(random_run, "--input", path, "--format", "jsonl", "--nbest", "2") == 0
    objects = [json.loads(line) for line in rows_of(capsys)]
    assert [item["flags"] for item in objects] == [["blank"]] * 3
    assert [item["ids"] for item in objects] == [[]] * 3


@pytest.mark.parametrize("beam", ["1", "4"])
@pytest.mark.parametrize("batch", ["1", "3", "16"])
def test_over_long_first_and_last_lines(
    beam: str, batch: str, random_run: Path, files: Files, capsys: Capture
) -> None:
    """S08, S09: a line beyond the limit stopped the work or shifted what followed: ten lines come
    out, the long ones from their beginnings, and stderr names them."""
    tokenizer = Tokenizer.load(random_run / "tokenizer.json")
    lines = [f"the dog {n}" for n in range(10)]
    kept = list(lines)
    for n in (0, 9):
        lines[n], kept[n] = long_line(tokenizer, "the small house", 10)
    options = ["--beam", beam, "--batch-size", batch, "--max-source-length", "10"]
    assert translate(random_run, "--input", files("kept", kept), "--beam", beam) == 0
    wanted = capsys.readouterr().out
    assert translate(random_run, "--input", files("long", lines), *options) == 0
    out, err = capsys.readouterr()
    assert out == wanted and out.count("\n") == 10
    warning = "warning: 2 lines had more subwords than the limit; what followed was left out"
    assert f"{warning}: line 1, 10\n" in err


def test_eval_of_a_model_on_empty_files(
    random_run: Path, files: Files, capsys: Capture, tmp_path: Path
) -> None:
    """E06: division by zero, or an index error of sacreBLEU; and nothing is left behind."""
    empty, output = files("empty", b""), tmp_path / "out"
    arguments = ["--model", str(random_run), "--source", empty, "--ref", empty]
    assert main(["eval", *arguments, "--output", str(output)]) == 3
    out, err = capsys.readouterr()
    assert out == "" and err == f"error: There are no lines to score: {empty} is empty.\n"
    assert os.listdir(tmp_path) == ["empty"]


# ---- scores -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        ["--beam", "1"],
        ["--beam", "4", "--nbest", "4"],
        ["--beam", "3", "--nbest", "3", "--max-length", "3", "--length-penalty", "1"],
        ["--beam", "2", "--prefix", "PREFIX", "--no-repeat-ngram", "2"],
        ["--sample", "--top-p", "0.8", "--temperature", "1.5", "--nbest", "3"],
        ["--sample", "--top-k", "9", "--prefix", "PREFIX", "--max-length", "30"],
    ],
    ids=lambda options: " ".join(options),
)
def test_printed_scores_are_forced_scores(
    options: list[str], random_run: Path, files: Files, capsys: Capture
) -> None:
    """S10: the score that the command line prints is the log-probability of the ids that it prints
    (and of EOS, where there is one), by teacher forcing: with prefixes, sampling and cut outputs
    too. Text and JSON print the same."""
    prefixes = ["Haus", "", "ein kleines", " ", "Hund läuft"]
    prefix = files("prefix", prefixes)
    options = [prefix if word == "PREFIX" else word for word in options]
    path = files("in", SOURCES)
    assert translate(random_run, "--input", path, "--format", "jsonl", *options) == 0
    objects = [json.loads(line) for line in rows_of(capsys)]
    engine = Translator.load(random_run, device="cpu")
    items, printed = [], []
    for item, source in zip(objects, SOURCES, strict=True):
        ids = [*engine.source_tokenizer.encode(source), EOS_ID]
        for h in item.get("hypotheses", [item]):
            items.append((ids, [*h["ids"], *([EOS_ID] if h["finished"] else [])]))
            printed.append(h)
            assert h["text"] == engine.target_tokenizer.decode(h["ids"])
        if prefix in options:
            forced = engine.target_tokenizer.encode(prefixes[item["line"] - 1].strip())
            assert item["ids"][: len(forced)] == forced
    power = 1.0 if "--length-penalty" in options else 0.5  # that of the run
    for h, score, (_, target) in zip(printed, engine.score_ids(items), items, strict=True):
        assert h["score"] == pytest.approx(score, abs=1e-4)
        assert h["ranked"] == pytest.approx(score / len(target) ** power, abs=1e-4)
    text = [*options, "--scores"]
    assert translate(random_run, "--input", path, *text) == 0
    rows = [line.rsplit(" ||| ", 2) for line in rows_of(capsys)]
    assert [float(row[1]) for row in rows] == pytest.approx([h["score"] for h in printed], abs=1e-6)


def test_likelihood_of_cut_pairs_is_told(random_run: Path, files: Files, capsys: Capture) -> None:
    """The NLL of a pair whose source was cut went into the mean without a word, and
    --max-source-length changed the translation alone."""
    lines = ["the dog", "the small house " * 20, "a dog runs"]
    source, ref = files("src", lines), files("ref", ["der Hund", "das Haus", "ein Hund"])
    arguments = ["eval", "--model", str(random_run), "--source", source, "--ref", ref]
    arguments += ["--device", "cpu", "--json"]
    engine = Translator.load(random_run, device="cpu")
    pairs = list(zip(lines, ["der Hund", "das Haus", "ein Hund"], strict=True))
    for options, longest, cut in (([], None, 0), (["--max-source-length", "6"], 6, 1)):
        assert main([*arguments, *options]) == 0
        out, err = capsys.readouterr()
        result = json.loads(out)
        scores = engine.score(pairs, max_source_length=longest)
        nll = -sum(s.sum for s in scores) / sum(s.tokens for s in scores)
        assert result["nll"] == pytest.approx(nll, abs=1e-5)
        assert result["cut_pairs"] == cut
        assert result["decoding"]["max_source_length"] == (longest or 1000)
        warning = "1 line went beyond the limit; the NLL is that of what was left: line 2\n"
        assert (f"warning: {warning}" in err) is bool(cut)


# ---- eval -------------------------------------------------------------------------------------


def test_likelihood_leaves_out_what_no_model_reads(
    random_run: Path, files: Files, capsys: Capture
) -> None:
    """A blank source was scored as if the model had read an EOS alone; `score` and validation leave
    it out, so one text had three likelihoods."""
    lines, refs = ["", "the dog", "  ", "a dog runs"], ["der Hund", "der Hund", "", "ein Hund"]
    files_given = ["--source", files("src", lines), "--ref", files("ref", refs)]
    device = ["--device", "cpu", "--json"]
    assert main(["eval", "--model", str(random_run), *files_given, *device]) == 0
    out, err = capsys.readouterr()
    result = json.loads(out)
    warning = "1 line had a blank source and a reference; the NLL is without it: line 1\n"
    assert f"warning: {warning}" in err and result["unscored_pairs"] == 1
    files_given[2] = "--target"
    assert main(["score", "--model", str(random_run), *files_given, *device]) == 0
    scored = json.loads(capsys.readouterr().out)
    assert (result["nll"], result["target_tokens"]) == (
        pytest.approx(scored["nll"]), scored["tokens"]
    )  # fmt: skip


def test_eval_tells_how_it_translates(random_run: Path, files: Files, capsys: Capture) -> None:
    """A score without checkpoint, beam and limits compares with nothing; JSON has them already."""
    source, ref = files("src", SOURCES), files("ref", SOURCES)
    arguments = ["eval", "--model", str(random_run), "--source", source, "--ref", ref]
    (checkpoint,) = (random_run / "checkpoints").glob("step-*")
    limits = "at most 12 tokens of output, 1000 of a source"
    assert main(arguments) == 0
    lines = capsys.readouterr().err.splitlines()
    assert f"model {checkpoint}: beam 2, length penalty 0.5; {limits}" in lines
    assert main([*arguments, "--sample", "--seed", "4", "--model", str(random_run)]) == 0
    lines = capsys.readouterr().err.splitlines()
    how = "sampling with temperature 1, seed 4"
    assert f"model {checkpoint} and {checkpoint}: {how}; {limits}" in lines
    drawn = ["--sample", "--seed", "4", "--top-k", "10", "--top-p", "0.9", "--min-length", "2"]
    assert main([*arguments, *drawn]) == 0  # such draws are another system
    how += ", top k 10, top p 0.9, min length 2"
    assert f"model {checkpoint}: {how}; {limits}" in capsys.readouterr().err.splitlines()
    assert main([*arguments, "--json"]) == 0
    assert "length penalty" not in capsys.readouterr().err


@pytest.mark.parametrize("command", ["eval", "translate"])
def test_a_wrong_output_path_costs_no_translation(
    command: str, random_run: Path, files: Files, capsys: Capture
) -> None:
    """The missing folder was found out after everything had been translated."""
    source = files("src", SOURCES)
    output = str(Path(source).parent / "no" / "dir" / "x")
    arguments = ["--source", source, "--ref", source] if command == "eval" else ["--input", source]
    assert main([command, "--model", str(random_run), *arguments, "--output", output]) == 3
    assert capsys.readouterr().err == (
        f"error: {output}: cannot write it: the folder {Path(output).parent} does not exist; make "
        "it first.\n"
    )


# ---- tokenize and encode ----------------------------------------------------------------------


@pytest.mark.skipif(not os.path.exists("/dev/fd"), reason="needs /dev/fd")
def test_tokenize_reads_a_pipe_of_the_shell(capsys: Capture, tmp_path: Path) -> None:
    """`tokenize <(zcat x.gz)` learned from the text and then reported on 0 lines: such a pipe can
    be read only once, like stdin."""
    reader, writer = os.pipe()
    os.write(writer, b"the house\nthe house\n")
    os.close(writer)
    output = tmp_path / "t.json"
    try:
        name = f"/dev/fd/{reader}"
        assert main(["tokenize", name, "--vocab-size", "262", "--output", str(output)]) == 0
    finally:
        os.close(reader)
    out = capsys.readouterr().out
    assert "2 lines, 4 words" in out and f"({name}, line 1)" in out


def test_tokenize_names_the_file_of_the_longest_line(
    files: Files, capsys: Capture, tmp_path: Path
) -> None:
    """The number of the longest line counted through all files and led to another line."""
    first, last = files("a", ["the house", "the"]), files("b", ["x", "the house is small"])
    texts = [first, files("none", b""), last]
    output = str(tmp_path / "t.json")
    for order in (texts, texts[::-1]):
        assert main(["tokenize", *order, "--vocab-size", "262", "--output", output]) == 0
        out = capsys.readouterr().out
        assert f"({last}, line 2)" in out.split("longest")[1].splitlines()[0]


def test_tokenize_separate(files: Files, capsys: Capture, tmp_path: Path) -> None:
    """`--source a --target b` made one joint file, and without a configuration there was no way to
    two."""
    source = files("a", ["the small house", "a small dog"] * 3)
    target = files("b", ["das kleine Haus", "ein kleiner Hund"] * 3)
    arguments = ["--source", source, "--target", target, "--vocab-size", "270"]
    joint, apart = tmp_path / "joint.json", tmp_path / "apart.json"
    assert main(["tokenize", *arguments, "--output", str(joint)]) == 0
    assert main(["tokenize", *arguments, "--output", str(apart), "--separate"]) == 0
    out = capsys.readouterr().out
    assert joint.exists() and not apart.exists()
    both = [Tokenizer.load(tmp_path / f"apart.{side}.json") for side in ("source", "target")]
    for found, text in zip(both, (source, target), strict=True):
        lines = Path(text).read_text(encoding="utf-8").splitlines()
        assert found.hash == train_tokenizer(lines, vocab_size=270).hash
        assert f"learned from {text}\n" in out
    assert main(["tokenize", "--help"]) == 0
    text = capsys.readouterr().out
    assert "F.source.json" in text and "F.target.json" in text


def test_encode_takes_the_tokenizer_of_the_checkpoint(
    random_run: Path, files: Files, capsys: Capture, tmp_path: Path
) -> None:
    """`encode` read the tokenizer.json of the run directory, `translate` that of the checkpoint:
    pieces that the model never sees."""
    run = tmp_path / "run"
    shutil.copytree(random_run, run)
    train_tokenizer(["qq xx qq"] * 3, vocab_size=264).save(run / "tokenizer.json")
    (checkpoint,) = (run / "checkpoints").glob("step-*")
    path = files("in", SOURCES)
    shown = []
    for model in (run, checkpoint, checkpoint / "tokenizer.json"):
        assert main(["encode", "--model", str(model), "--input", path]) == 0
        shown.append(capsys.readouterr().out)
    assert shown[0] == shown[1] == shown[2]
    assert main(["encode", "--model", str(run), "--side", "target", "--input", path]) == 0
    assert capsys.readouterr().out == shown[0]  # one vocabulary for both sides
    for side in ("source", "target"):
        shutil.copy(checkpoint / "tokenizer.json", checkpoint / f"tokenizer.{side}.json")
    (checkpoint / "tokenizer.json").unlink()
    train_tokenizer(["qq xx qq"] * 3, vocab_size=264).save(checkpoint / "tokenizer.target.json")
    assert main(["encode", "--model", str(run), "--input", path]) == 0
    assert capsys.readouterr().out == shown[0]
    assert main(["encode", "--model", str(run), "--side", "target", "--input", path]) == 0
    assert capsys.readouterr().out != shown[0]
    for name in ("tokenizer.source.json", "tokenizer.target.json"):
        (checkpoint / name).unlink()
    assert main(["encode", "--model", str(run), "--input", path]) == 4
    assert "holds no tokenizer.json" in capsys.readouterr().err
