"""score, average, check, completion, --json of the other commands, colours and progress bars."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import shutil
import subprocess
import sys
import termios
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from mttrain.cli import main

Capture = pytest.CaptureFixture[str]
Files = Callable[..., str]
SOURCES = ["the small house.", "a dog runs", "dog", "läuft the Haus", "", "the", ""]
TARGETS = ["kleines Haus.", "ein Hund läuft", "", "the — 狗", "", "ein Haus. Ein Haus. ein", "Hund"]
SCORED = [0, 1, 2, 3, 5]  # the others have a blank source


@pytest.fixture(scope="module")
def two_runs(random_run: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Checkpoints of one shape with other weights: the run's own, and two of another run."""
    import torch

    from mttrain.checkpoint import Index, load_model, save_checkpoint, write_index

    run = tmp_path_factory.mktemp("other_run")
    index = Index()
    for step in (2, 3):
        bundle = load_model(random_run)
        with torch.no_grad():
            for number, parameter in enumerate(bundle.model.parameters()):
                parameter += (
                    0.01
                    * step
                    * torch.sin(torch.arange(parameter.numel()) + number).view(parameter.shape)
                )
        meta = {name: bundle.meta[name] for name in ("source_lang", "target_lang", "max_length")}
        meta["scores"] = {"bleu": float(step)}
        tokenizers = bundle.source_tokenizer, bundle.target_tokenizer
        path = save_checkpoint(run, step, bundle.model, meta, tokenizers, None)
        index = index.added(path.name, {"bleu": float(step)})
    write_index(run, index)
    return [random_run, run]


def log_probs(run: Path, source: str, target: str) -> list[float]:
    """By a plain forward pass of one pair: log_softmax of all logits, the target's ones picked."""
    import torch

    from mttrain.checkpoint import load_model

    bundle = load_model(run)
    src = [*bundle.source_tokenizer.encode(source), 3]
    out = [*bundle.target_tokenizer.encode(target), 3]
    with torch.no_grad():
        hidden = bundle.model(torch.tensor([src]), torch.tensor([[2, *out[:-1]]]))
        table = torch.log_softmax(bundle.model.project(hidden).double(), -1)[0]
    return [float(table[place, token]) for place, token in enumerate(out)]


def texts(files: Files) -> list[str]:
    return ["--source", files("s.en", SOURCES), "--target", files("t.de", TARGETS)]


# ---- score ------------------------------------------------------------------------------------


def test_scores_are_those_of_a_forward_pass(
    random_run: Path, files: Files, capsys: Capture
) -> None:
    """One number a line, in order, whatever the batches; blank sources never reach the model."""
    wanted = [sum(log_probs(random_run, SOURCES[i], TARGETS[i])) for i in SCORED]
    for batch in ([], ["--batch-tokens", "7"]):
        command = ["score", "--model", str(random_run), *texts(files), "--precision", "fp32"]
        assert main([*command, *batch]) == 0
        out, err = capsys.readouterr()
        found = out.splitlines()
        assert len(found) == len(SOURCES)
        assert [float(found[i]) for i in SCORED] == pytest.approx(wanted, abs=2e-5)
        assert found[4] == "0.000000" and found[6] == "nan"
    assert "7 pairs, 1 of them blank" in err and "line 7" in err and "\r" not in err
    total = sum(wanted)
    assert f"log-probability {total:.2f}" in err


def test_scores_of_tokens_and_means(random_run: Path, files: Files, capsys: Capture) -> None:
    """--tokens: pieces with their own log-probabilities, EOS last; --normalize: the mean."""
    command = ["score", "--model", str(random_run), *texts(files), "--precision", "fp32"]
    assert main([*command, "--tokens", "--normalize"]) == 0
    lines = capsys.readouterr().out.splitlines()
    for i in SCORED:
        wanted = log_probs(random_run, SOURCES[i], TARGETS[i])
        mean, pieces, each = lines[i].split(" ||| ")
        assert list(map(float, each.split())) == pytest.approx(wanted, abs=2e-5)
        assert pieces.split()[-1] == "</s>" and len(pieces.split()) == len(wanted)
        assert float(mean) == pytest.approx(sum(wanted) / len(wanted), abs=2e-5)
    assert lines[4] == "0.000000 |||  ||| "
    assert main([*command, "--tokens", "--format", "jsonl"]) == 0
    objects = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [item["line"] for item in objects] == list(range(1, 8))
    assert [item["target"] for item in objects] == TARGETS
    assert objects[6]["score"] is None and objects[6]["flags"] == ["blank"]
    for i in SCORED:
        assert objects[i]["score"] == pytest.approx(sum(objects[i]["log_probs"]), abs=1e-5)
        assert objects[i]["tokens"] == len(objects[i]["pieces"]) == len(objects[i]["log_probs"])


def test_score_equals_what_translate_printed(
    random_run: Path, files: Files, tmp_path: Path, capsys: Capture
) -> None:
    """S10: a printed score that is not the model's own. Only where the text gives the same ids."""
    from mttrain.tokenizer import Tokenizer

    source = files("in.en", SOURCES[:4])
    model = ["--model", str(random_run), "--precision", "fp32"]
    assert main(["translate", *model, "--input", source, "--format", "jsonl"]) == 0
    printed = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    target = files("out.de", [item["text"] for item in printed])
    assert main(["score", *model, "--source", source, "--target", target]) == 0
    scores = list(map(float, capsys.readouterr().out.splitlines()))
    tokenizer = Tokenizer.load(random_run / "tokenizer.json")
    same = [
        (item["score"], score)
        for item, score in zip(printed, scores, strict=True)
        if item["finished"] and tokenizer.encode(item["text"]) == item["ids"]
    ]
    for wanted, found in same:
        assert found == pytest.approx(wanted, abs=1e-4)


def test_ensemble_averages_probabilities(
    two_runs: list[Path], files: Files, tmp_path: Path, capsys: Capture
) -> None:
    """The mean of log-probabilities would be another, sharper model."""
    import math

    models = [word for run in two_runs for word in ("--model", str(run))]
    output = tmp_path / "scores.txt"
    command = ["score", *models, *texts(files), "--output", str(output), "--json"]
    assert main([*command, "--precision", "fp32"]) == 0
    found = output.read_text().splitlines()
    tokens, total = 0, 0.0
    for i in SCORED:
        each = [log_probs(run, SOURCES[i], TARGETS[i]) for run in two_runs]
        means = [math.log((math.exp(a) + math.exp(b)) / 2) for a, b in zip(*each, strict=True)]
        assert float(found[i]) == pytest.approx(sum(means), abs=2e-5)
        tokens, total = tokens + len(means), total + sum(means)
    [result] = map(json.loads, capsys.readouterr().out.splitlines())
    assert result["tokens"] == tokens and result["pairs"] == 7
    assert (result["blank_pairs"], result["unscored_pairs"], result["cut_pairs"]) == (1, 1, 0)
    assert result["perplexity"] == pytest.approx(math.exp(-total / tokens), rel=1e-4)
    assert len(result["model"]) == 2


def test_windows_give_the_same_scores(
    random_run: Path, files: Files, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    """A file larger than a window: nothing is lost or shifted where two of them meet."""
    from mttrain import cli_tools

    rows = [(SOURCES[i % 4], TARGETS[i % 4]) for i in range(11)]
    sides = [files(str(n), list(side)) for n, side in enumerate(zip(*rows, strict=True))]
    names = ["--source", sides[0], "--target", sides[1]]
    command = ["score", "--model", str(random_run), *names, "--precision", "fp32"]
    assert main(command) == 0
    whole = capsys.readouterr().out
    monkeypatch.setattr(cli_tools, "_WINDOW", 3)
    assert main(command) == 0
    parts = capsys.readouterr().out
    assert [float(x) for x in parts.split()] == pytest.approx([float(x) for x in whole.split()])
    assert len(set(whole.split())) == 4


def test_cut_pairs_are_counted(random_run: Path, files: Files, capsys: Capture) -> None:
    command = ["score", "--model", str(random_run), *texts(files), "--max-source-length", "3"]
    assert main([*command, "--json"]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["cut_pairs"] >= 2 and "went beyond the limit" in err


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--source", "s"], "Name the text"),
        (["--pairs", "x.tsv", "--source", "s"], "--pairs holds both sides"),
        (["--source", "s", "--target", "t", "--langs", "en-de"], "--langs and --fields have"),
        (["--source", "s", "--target", "t", "--format", "jsonl", "--normalize"], "always holds"),
        (["--source", "s", "--target", "t", "--json", "--tokens"], "needs --output F"),
        (["--source", "s", "--target", "t", "--batch-tokens", "0"], "--batch-tokens is 0"),
        (["--source", "s", "--target", "t"], "no such file"),
    ],
)
def test_wrong_options_of_score(more: list[str], message: str, capsys: Capture) -> None:
    """Options that contradict each other end before a model is loaded."""
    assert main(["score", "--model", "nowhere", *more]) in (2, 3)
    assert message in capsys.readouterr().err


def test_unequal_files_are_refused_before_the_model(files: Files, capsys: Capture) -> None:
    """T10: hours of scoring, then a message that the last lines have no partner."""
    source, target = files("s", ["a", "b"]), files("t", ["a"])
    assert main(["score", "--model", "nowhere", "--source", source, "--target", target]) == 3
    assert "has 2 lines but" in capsys.readouterr().err


def test_score_of_a_table(random_run: Path, files: Files, capsys: Capture) -> None:
    """Both sides in one file give the numbers of two files."""
    rows = [f"{s}\t{t}" for s, t in zip(SOURCES[:2], TARGETS[:2], strict=True)]
    table = files("both.tsv", rows)
    assert main(["score", "--model", str(random_run), "--pairs", table]) == 0
    one = capsys.readouterr().out.splitlines()
    assert main(["score", "--model", str(random_run), *texts(files)]) == 0
    two = capsys.readouterr().out.splitlines()[:2]
    assert [float(x) for x in one] == pytest.approx([float(x) for x in two], abs=1e-4)
    assert main(["score", "--model", str(random_run), *texts(files), "--output", table]) == 0
    again = ["score", "--model", str(random_run), "--pairs", files("c.tsv", rows)]
    assert main([*again, "--output", files("c.tsv", rows)]) == 2


# ---- average ----------------------------------------------------------------------------------


def test_average_is_the_mean_and_translates(
    two_runs: list[Path], tmp_path: Path, files: Files, capsys: Capture
) -> None:
    """The weights, by hand; what was averaged, with hashes; and the directory stands alone."""
    import torch
    from safetensors.torch import load_file

    from mttrain.corpus import file_sha256

    output = tmp_path / "mean"
    before = (two_runs[1] / "checkpoints" / "index.json").read_bytes()
    assert main(["average", str(two_runs[1]), "--last", "2", "--output", str(output)]) == 0
    assert capsys.readouterr().out == f"{output}\n"
    members = [two_runs[1] / "checkpoints" / f"step-0000000{n}" for n in (2, 3)]
    one, two = (load_file(member / "model.safetensors") for member in members)
    mean = load_file(output / "model.safetensors")
    assert mean.keys() == one.keys()
    for name, tensor in mean.items():
        assert torch.allclose(tensor, (one[name] + two[name]) / 2, atol=1e-7)
    meta = json.loads((output / "meta.json").read_text())
    assert [m["path"] for m in meta["averaged"]] == [str(m.resolve()) for m in members]
    assert [m["weights_sha256"] for m in meta["averaged"]] == [
        file_sha256(member / "model.safetensors") for member in members
    ]
    assert meta["step"] == 3 and meta["scores"] == {}
    assert before == (two_runs[1] / "checkpoints" / "index.json").read_bytes()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mean"]  # nothing aside is left
    moved = tmp_path / "moved"
    output.rename(moved)
    assert main(["translate", "--model", str(moved), "--input", files("x", ["a dog", ""])]) == 0
    assert capsys.readouterr().out.count("\n") == 2


def test_average_chooses_the_best(two_runs: list[Path], tmp_path: Path, capsys: Capture) -> None:
    output = tmp_path / "mean"
    command = ["average", str(two_runs[1]), "--best", "2", "--output", str(output), "--json"]
    assert main(command) == 0
    made = json.loads(capsys.readouterr().out)
    assert [member["step"] for member in made["averaged"]] == [3, 2]
    assert made["averaged"][0]["scores"] == {"bleu": 3.0} and made["output"] == str(output)


def test_average_of_two_runs_warns(two_runs: list[Path], tmp_path: Path, capsys: Capture) -> None:
    """Models that were trained apart have no mean that translates."""
    names = [str(run) for run in two_runs]
    assert main(["average", *names, "--output", str(tmp_path / "mean")]) == 0
    assert "warning: these checkpoints lie in different runs" in capsys.readouterr().err


def test_average_is_refused(two_runs: list[Path], tmp_path: Path, capsys: Capture) -> None:
    """An average over other models, a place where it would do harm, or too few checkpoints."""
    run = str(two_runs[1])
    step = two_runs[1] / "checkpoints" / "step-00000002"
    full = tmp_path / "full"
    full.mkdir()
    (full / "mine.txt").write_text("x")
    other = tmp_path / "other"
    shutil.copytree(step, other)
    meta = json.loads((other / "meta.json").read_text())
    meta["model"]["activation"] = "gelu"
    (other / "meta.json").write_text(json.dumps(meta))
    new = str(tmp_path / "new")
    cases: list[tuple[list[str], int, str]] = [
        ([run, "--last", "3", "--output", new], 4, "has 2 checkpoints, not 3"),
        ([run, "--last", "1", "--output", new], 2, "--last is 1"),
        ([run, "--output", new], 2, "Give two checkpoints or more"),
        ([run, run, "--output", new], 4, "is named twice"),
        ([run, "--last", "2"], 2, "--output DIR"),
        ([run, "--last", "2", "--best", "2", "--output", new], 2, "not both"),
        ([run, run, "--last", "2", "--output", new], 2, "from one run"),
        ([run, "--last", "2", "--output", str(full)], 2, "exists"),
        ([run, "--last", "2", "--output", f"{run}/checkpoints/average"], 2, "lies inside the run"),
        ([run, "--last", "2", "--output", f"{run}/mean"], 2, "lies inside the run"),
        ([run, "--last", "2", "--output", f"{other}/mean"], 2, "lies inside the checkpoint"),
        ([run, "--last", "2", "--output", f"{new}/a/b"], 2, "does not exist"),
        ([str(step), str(other), "--output", new], 4, "activation is gelu and relu"),
        ([str(tmp_path), "--last", "2", "--output", new], 4, "holds no checkpoints"),
    ]
    for arguments, status, message in cases:
        assert main(["average", *arguments]) == status, arguments
        assert message in capsys.readouterr().err
    assert not Path(new).exists() and not list(tmp_path.glob(".tmp*"))


# ---- check ------------------------------------------------------------------------------------


def test_check_of_two_files(files: Files, random_run: Path, capsys: Capture) -> None:
    """A finding with its line and example on stdout; status 0, or 3 with --strict."""
    source = files("s.en", ["the house.", "a\tdog", "the end"] + [f"line {n} x" for n in range(9)])
    target = files("t.de", ["das Haus.", "ein Hund", ""] + [f"Zeile {n} y" for n in range(9)])
    assert main(["check", source, target]) == 0
    out, err = capsys.readouterr()
    assert "warning: source: 1 of 12 (8.33 %) lines with a tab: line 2" in out
    assert '    line 2: "a\\tdog"' in out and "blank on one side" in out
    assert "0 errors, 2 warnings, 0 notes" in err and "no vocabulary given" in err
    assert "\r" not in err
    assert main(["check", source, target, "--strict"]) == 3
    capsys.readouterr()
    with_model = ["--model", str(random_run), "--max-length", "3", "--max-ratio", "9"]
    assert main(["check", source, target, "--json", *with_model]) == 0
    [result] = map(json.loads, capsys.readouterr().out.splitlines())
    [text] = result["texts"]
    assert text["pairs"] == 12 and result["warnings"] == 3
    assert {f["kind"] for f in text["findings"]} == {"tab", "blank", "too_long"}
    assert "source subwords" in text["lengths"]
    assert main(["check", files("c.en", ["a b"]), files("c.de", ["c d"]), "--strict"]) == 0


def test_check_tells_all_that_cannot_be_read(files: Files, capsys: Capture) -> None:
    """T07, T10: each run told of one fault only, and the next one showed the next."""
    source, target = files("s", b"one\ncaf\xe9\nthree\n"), files("t", b"eins\r\nzwei\r\n")
    assert main(["check", source, target]) == 3
    out = capsys.readouterr().out
    assert f"{source} has 3 and {target} has 2" in out
    assert "source: 1 of 3 (33.3 %) lines that are not UTF-8" in out
    assert '"caf\\xe9"' in out and "byte 0xe9 at offset 7" in out
    assert "target: 2 of 2 (100 %) lines that end in CR LF" in out
    assert main(["check", source, target, "--json"]) == 3
    result = json.loads(capsys.readouterr().out)
    assert result["errors"] == 2 and result["notes"] == 1


def test_check_of_a_configuration(files: Files, tmp_path: Path, capsys: Capture) -> None:
    """The corpora, held-out text and languages that the run will have."""
    lines = [f"sentence number {n} of it" for n in range(30)]
    names = {
        name: (files(f"{name}.en", lines), files(f"{name}.de", lines[::-1]))
        for name in ("train", "valid")
    }
    config = tmp_path / "run.yaml"
    config.write_text(
        f"run_dir: {tmp_path}/run\ndata:\n  source_lang: en\n  target_lang: de\n"
        + "".join(f"  {n}: {{source: {s}, target: {t}}}\n" for n, (s, t) in names.items())
        + "train: {max_steps: 1}\n"
    )
    assert main(["check", "--config", str(config), "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert [text["role"] for text in result["texts"]] == ["training", "validation"]
    [overlap] = [f for f in result["texts"][1]["findings"] if f["kind"] == "overlap"]
    assert overlap["count"] == 30 and overlap["detail"] == "30 with the same target"
    files_ = [*names["train"], "--valid", *names["valid"], "--json"]
    assert main(["check", *files_]) == 0
    found = json.loads(capsys.readouterr().out)["texts"][1]["findings"]
    assert [f["count"] for f in found if f["kind"] == "overlap"] == [30]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "Name the text"),
        (["one"], "Give two files"),
        (["a", "b", "--config", "c"], "Name the text"),
        (["a", "b", "--set", "seed=1"], "--set changes"),
        (["a", "b", "--fields", "1,2"], "--fields has an effect only"),
        (["--config", "c", "--langs", "en-de"], "No effect with --config"),
        (["a", "b", "--model", "m", "--tokenizer", "t"], "not both"),
        (["a", "b", "--max-ratio", "1"], "--max-ratio is 1"),
        (["a", "b"], "no such file"),
    ],
)
def test_wrong_options_of_check(arguments: list[str], message: str, capsys: Capture) -> None:
    assert main(["check", *arguments]) in (2, 3)
    assert message in capsys.readouterr().err


def test_max_length_needs_a_vocabulary(files: Files, capsys: Capture) -> None:
    """An option that would silently do nothing."""
    assert main(["check", files("a", ["x"]), files("b", ["y"]), "--max-length", "9"]) == 2
    assert "--max-length counts subwords" in capsys.readouterr().err


# ---- --json of the other commands ---------------------------------------------------------------


def test_tokenize_as_json(files: Files, tmp_path: Path, capsys: Capture) -> None:
    """One object whose figures are those of the table."""
    one, two = files("a.en", ["the dog", "the dog runs fast"]), files("b.de", ["der Hund"] * 2)
    output = str(tmp_path / "tok.json")
    command = ["tokenize", "--source", one, "--target", two, "--vocab-size", "270"]
    assert main([*command, "--output", output]) == 0
    table = capsys.readouterr().out
    assert main([*command, "--output", output, "--json"]) == 0
    [found] = json.loads(capsys.readouterr().out)["vocabularies"]
    assert found["output"] == output and found["learned_from"] == [one, two]
    assert f"{found['size']} tokens" in table and f"{found['tokens']} tokens" in table
    assert (found["lines"], found["words"], found["failures"]) == (4, 10, 0)
    assert found["longest_line"] == {"text": one, "line": 2}
    assert main([*command, "--separate", "--output", output, "--json"]) == 0
    both = json.loads(capsys.readouterr().out)["vocabularies"]
    assert [Path(item["output"]).name for item in both] == ["tok.source.json", "tok.target.json"]


def test_tokenize_of_a_configuration_with_a_table(
    files: Files, tmp_path: Path, capsys: Capture
) -> None:
    """A corpus in one file has no source file, and the vocabulary was learned from nothing."""
    table = files("t.tsv", ["the dog\tder Hund", "the house\tdas Haus"] * 3)
    config = tmp_path / "run.yaml"
    config.write_text(
        f"run_dir: {tmp_path}/run\ndata:\n  source_lang: en\n  target_lang: de\n"
        f"  train: {{pairs: {table}}}\n  valid: {{pairs: {table}}}\n"
        "tokenizer: {vocab_size: 280, shared: false}\nmodel: {tie: target}\ntrain: {max_steps: 1}\n"
    )
    output = str(tmp_path / "tok.json")
    assert main(["tokenize", "--config", str(config), "--output", output, "--json"]) == 0
    both = json.loads(capsys.readouterr().out)["vocabularies"]
    assert [item["learned_from"] for item in both] == [[f"{table} (source)"], [f"{table} (target)"]]
    assert [item["characters"] for item in both] == [3 * 16, 3 * 16]


def test_encode_as_json_lines(random_run: Path, files: Files, capsys: Capture) -> None:
    """Pieces and ids that --decode takes back."""
    source = files("x", ["the dog — 狗", ""])
    command = ["encode", "--model", str(random_run)]
    assert main([*command, "--input", source, "--format", "jsonl"]) == 0
    found = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [item["text"] for item in found] == ["the dog — 狗", ""]
    ids = files("ids", [" ".join(map(str, item["ids"])) for item in found])
    assert main([*command, "--input", ids, "--ids", "--decode", "--format", "jsonl"]) == 0
    assert [json.loads(line) for line in capsys.readouterr().out.splitlines()] == found
    assert main([*command, "--input", source, "--ids", "--format", "jsonl"]) == 2


@pytest.fixture(scope="module")
def tiny_config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    for name, count in (("train", 40), ("valid", 6), ("test", 5)):
        (folder / f"{name}.en").write_text("".join(f"word {n} here\n" for n in range(count)))
        (folder / f"{name}.de").write_text("".join(f"Wort {n} hier\n" for n in range(count)))
    config = folder / "run.yaml"
    config.write_text(
        f"run_dir: {folder}/run\ndata:\n  source_lang: en\n  target_lang: de\n"
        + "".join(
            f"  {n}: {{source: {folder}/{n}.en, target: {folder}/{n}.de}}\n"
            for n in ("train", "valid", "test")
        )
        + "tokenizer: {vocab_size: 280}\n"
        "model: {d_model: 16, d_ff: 16, num_heads: 2, encoder_layers: 1, decoder_layers: 1}\n"
        "train: {batch_tokens: 128, max_steps: 4, valid_every: 2, average: 0, device: cpu}\n"
        "decode: {beam: 1, max_length: 6}\n"
    )
    return config


def test_dry_run_as_json(tiny_config: Path, capsys: Capture) -> None:
    """The figures that the dry run prints for people."""
    assert main(["train", "--config", str(tiny_config), "--dry-run", "--json"]) == 0
    out, err = capsys.readouterr()
    found = json.loads(out)
    assert found["reason"] == "dry_run" and found["run_dir"] == str(tiny_config.parent / "run")
    assert found["corpus"]["splits"][0]["pairs"] == 40
    epoch = found["epoch"]
    assert f"an epoch: {epoch['batches']} batches, {epoch['updates_per_epoch']} updates" in err
    assert found["epochs"] == pytest.approx(4 / epoch["updates_per_epoch"])
    assert found["tokenizers"][0]["size"] > 260
    assert not (tiny_config.parent / "run").exists()


def test_result_of_training_as_json(tiny_config: Path, capsys: Capture) -> None:
    """The same object when the finished run is started again; scores with their signatures."""
    command = ["train", "--config", str(tiny_config), "--json"]
    assert main(command) == 0
    found = json.loads(capsys.readouterr().out)
    run = tiny_config.parent / "run"
    assert (found["reason"], found["updates"], found["resumed"]) == ("max_steps", 4, False)
    assert found["checkpoint"] == str(run / "checkpoints" / found["best"])
    assert (Path(found["checkpoint"]) / "meta.json").is_file()
    assert [score["name"] for score in found["test"]] == ["BLEU", "chrF", "TER"]
    assert all(score["signature"] for score in found["test"])
    assert found["validation"]["signatures"] and found["validation"]["bleu"] >= 0
    assert main(command) == 0
    assert json.loads(capsys.readouterr().out) == found


# ---- completion -------------------------------------------------------------------------------


@contextlib.contextmanager
def command_on_path(folder: Path) -> Iterator[dict[str, str]]:
    """An environment in which a shell finds `mttrain`."""
    script = folder / "mttrain"
    script.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m mttrain "$@"\n')
    script.chmod(0o755)
    root = str(Path(__file__).resolve().parents[2])
    yield {**os.environ, "PATH": f"{folder}:{os.environ['PATH']}", "PYTHONPATH": root}


@pytest.mark.skipif(shutil.which("bash") is None, reason="no bash")
def test_completion_in_bash(tmp_path: Path) -> None:
    """The script that is printed, evaluated by the shell, as at TAB: commands, options, choices,
    and nothing for a file, so that bash offers its own."""
    lines = {
        "mttrain tra": ["train", "translate"],
        "mttrain translate --form": ["--format"],
        "mttrain translate --format ": ["text", "jsonl"],
        "mttrain score --precision b": ["bf16"],
        "mttrain completion ": ["bash", "zsh", "fish"],
        "mttrain translate --input ": [],
        "mttrain average runs/": [],
    }
    script = ['eval "$(mttrain completion bash)"', "complete -p mttrain"]
    for line in lines:
        words = line.split(" ")
        quoted = " ".join(f"'{word}'" for word in words)
        script.append(
            f"COMP_WORDS=({quoted}); COMP_CWORD={len(words) - 1}; _mttrain_completion mttrain; "
            'echo "${COMPREPLY[*]}"'
        )
    with command_on_path(tmp_path) as env:
        done = subprocess.run(
            ["bash", "--norc", "-c", "\n".join(script)], env=env, capture_output=True, text=True
        )
    registered, *answers = done.stdout.split("\n")[: len(lines) + 1]
    assert "-o default" in registered and registered.endswith("mttrain")
    assert answers == [" ".join(words) for words in lines.values()], done.stderr


@pytest.mark.parametrize(
    ("shell", "asked", "wanted"),
    [
        ("zsh", {"_TYPER_COMPLETE_ARGS": "mttrain encode --de"}, '"--decode":"From pieces'),
        ("zsh", {"_TYPER_COMPLETE_ARGS": "mttrain encode --input "}, "_files"),
        (
            "fish",
            {"_TYPER_COMPLETE_ARGS": "mttrain enc", "_TYPER_COMPLETE_FISH_ACTION": "get-args"},
            "encode\tShow the pieces",
        ),
    ],
)
def test_completion_as_other_shells_ask(
    shell: str, asked: dict[str, str], wanted: str, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    for name, value in {"_MTTRAIN_COMPLETE": f"complete_{shell}", **asked}.items():
        monkeypatch.setenv(name, value)
    assert main([]) == 0
    assert wanted in capsys.readouterr().out


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_prints_the_script_alone(shell: str, capsys: Capture) -> None:
    """It is evaluated: a word of advice in it would be run as a command."""
    assert main(["completion", shell]) == 0
    out, err = capsys.readouterr()
    assert "_MTTRAIN_COMPLETE=complete_" in out and "mttrain" in out and err == ""
    assert main(["completion", "tcsh"]) == 2


def test_completion_imports_nothing_heavy() -> None:
    """Each TAB would take as long as importing torch."""
    code = (
        "import sys; from mttrain.cli import main; main([]); "
        "print(*{name.split('.')[0] for name in sys.modules}, file=sys.stderr)"
    )
    env = {**os.environ, "_MTTRAIN_COMPLETE": "complete_bash", "COMP_WORDS": "mttrain translate --"}
    done = subprocess.run(
        [sys.executable, "-c", code], env={**env, "COMP_CWORD": "2"}, capture_output=True, text=True
    )
    assert "--beam" in done.stdout.split()
    assert not {"torch", "numpy", "tokenizers", "sacrebleu", "yaml"} & set(done.stderr.split())


# ---- terminals ---------------------------------------------------------------------------------


@contextlib.contextmanager
def terminal(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], str]]:
    """A terminal as stderr; call what is yielded for all that was written to it."""
    master, slave = pty.openpty()
    termios.tcsetwinsize(slave, (24, 80))  # without a width there is no bar
    stream = os.fdopen(slave, "w", encoding="utf-8")

    def written() -> str:
        stream.flush()
        os.set_blocking(master, False)
        parts = []
        with contextlib.suppress(BlockingIOError, OSError):
            while part := os.read(master, 65536):
                parts.append(part)
        return b"".join(parts).decode("utf-8")

    monkeypatch.setattr(sys, "stderr", stream)
    try:
        yield written
    finally:
        monkeypatch.undo()
        stream.close()
        os.close(master)


@pytest.mark.parametrize(
    ("environment", "colour"),
    [
        ({"TERM": "xterm-256color"}, True),
        ({"TERM": "xterm-256color", "NO_COLOR": ""}, True),
        ({"TERM": "xterm-256color", "NO_COLOR": "1"}, False),
        ({"TERM": "dumb"}, False),
        ({"TERM": ""}, False),
        ({"TERM": "dumb", "FORCE_COLOR": "1"}, False),
    ],
    ids=str,
)
def test_colours_on_a_terminal(
    environment: dict[str, str], colour: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Errors in red and warnings in yellow where a terminal shows them and nobody objects."""
    monkeypatch.delenv("NO_COLOR", raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with terminal(monkeypatch) as written:
        assert main(["train"]) == 2
        shown = written()
    red = "\x1b[1;31merror:\x1b[0m Name the configuration"
    assert (red in shown) == colour
    assert colour or ("error: Name the configuration" in shown and "\x1b" not in shown)


def test_no_colours_in_a_pipe(monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    """Scripts that look for "error:" at the start of a line found an escape sequence there."""
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert main(["train"]) == 2
    assert capsys.readouterr().err.startswith("error: Name the configuration")


def commands(random_run: Path, files: Files, folder: Path) -> dict[str, list[str]]:
    """Each command at work, its result going to a file."""
    source, target = files("p.en", SOURCES), files("p.de", TARGETS)
    output = ["--output", str(folder / "result")]
    model = ["--model", str(random_run)]
    return {
        "tokenize": ["tokenize", source, "--vocab-size", "270", "--output", str(folder / "t.json")],
        "encode": ["encode", *model, "--input", source, *output],
        "translate": ["translate", *model, "--input", source, *output],
        "eval": ["eval", *model, "--source", source, "--ref", source],
        "score": ["score", *model, "--source", source, "--target", target, *output],
        "check": ["check", source, target],
    }


@pytest.mark.parametrize("name", ["tokenize", "encode", "translate", "eval", "score", "check"])
def test_progress_is_for_terminals_alone(
    name: str,
    random_run: Path,
    files: Files,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: Capture,
) -> None:
    """A log file filled with carriage returns; and a terminal where nothing seems to happen."""
    arguments: list[Any] = commands(random_run, files, tmp_path)[name]
    assert main(arguments) == 0
    assert "\r" not in capsys.readouterr().err
    with terminal(monkeypatch) as written:
        assert main(arguments) == 0
        shown = written()
    assert " lines" in shown and "\r" in shown.replace("\r\n", "")
    if name == "tokenize":
        assert "7 lines are read; learning 270 tokens" in shown
