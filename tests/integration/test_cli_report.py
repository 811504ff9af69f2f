"""`mttrain report`, `attention` and `positions` through the command line."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from mttrain.cli import main
from mttrain.model import sinusoidal_positions
from mttrain.trainer import train
from mttrain.translator import Translator
from tests.integration.report_help import made_run
from tests.integration.training_help import random_sentences, tiny_config, write_pairs

Capture = pytest.CaptureFixture[str]
Files = Callable[..., str]


# ---- report -----------------------------------------------------------------------------------


def test_report_prints_its_scores(tmp_path: Path, random_run: Path, capsys: Capture) -> None:
    run = made_run(tmp_path, "run", random_run)
    output = tmp_path / "r.html"
    arguments = ["report", str(run), "--output", str(output), "--lines", "4", "--json"]
    assert main([*arguments, "--device", "cpu", "--threads", "1"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["output"] == str(output)
    names = [score["name"] for score in result["runs"][0]["scores"]]
    assert names == ["BLEU", "chrF", "TER"]
    assert "4 of 8 lines" in output.read_text(encoding="utf-8")
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "r.html", "run", "text.src", "text.tgt",
    ]  # fmt: skip


def test_report_leaves_the_run_alone(tmp_path: Path, random_run: Path) -> None:
    """Stops a report from changing a run that somebody is training in."""
    run = made_run(tmp_path, "run", random_run)
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    assert main(["report", str(run), "--output", str(tmp_path / "r.html"), "--lines", "0"]) == 0
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["report", "{run}", "{run}"], "named twice"),
        (["report", "{run}", "--output", "{run}/r.txt"], "ends in .html"),
        (["report", "{run}", "--lines", "-1"], "--lines is -1"),
        (["report", "{run}", "--lines", "0", "--split", "valid"], "no effect"),
        (["report", "{run}", "--split", "test"], "no test set"),
        (["report", "{run}", "--output", "{run}/no/r.html"], "does not exist"),
        (["report", "{run}/none"], "does not exist"),
        (["attention", "{run}"], "Give one sentence"),
        (["attention", "{run}", "a", "--input", "{run}/log.jsonl"], "Give one sentence"),
        (["attention", "{run}", "a"], "Name the picture"),
        (["attention", "{run}", "a", "--output", "a.jpg"], "Name the picture"),
        (["attention", "{run}", " ", "--output", "{run}/a.svg"], "blank"),
        (["attention", "{run}", "a", "--format", "json", "--layer", "2"], "there are 1 layers"),
        (["attention", "{run}", "a", "--format", "json", "--head", "3"], "--head is 3"),
        (["attention", "{run}", "a", "--format", "json", "--head", "x"], "--head is x"),
        (["attention", "{run}", "a", "--format", "pharaoh", "--kind", "encoder"], "remove --kind"),
        (["attention", "{run}", "a", "--unit", "piece", "--output", "a.svg"], "--unit has no"),
        (["attention", "{run}", "--input", "{run}/log.jsonl"], "shows one sentence"),
        (["attention", "{run}", "a", "--target-input", "{run}/log.jsonl"], "only with --input"),
        (
            ["attention", "{run}", "--input", "{run}/log.jsonl", "--target", "b",
             "--format", "json"],
            "--target-input",
        ),
        (
            ["attention", "{run}", "--input", "{run}/log.jsonl", "--format", "json",
             "--output", "{run}/log.jsonl"],
            "--output is the input file",
        ),
        (["positions"], "Name the picture"),
        (["positions", "--d-model", "1", "--format", "text"], "--d-model is 1"),
    ],
)  # fmt: skip
def test_refusals(
    arguments: list[str], words: str, tmp_path: Path, random_run: Path, capsys: Capture
) -> None:
    """Each before anything is written, in one sentence, with a status other than 0."""
    run = made_run(tmp_path, "run", random_run)
    given = [argument.replace("{run}", str(run)) for argument in arguments]
    assert main(given) in (2, 3, 4)
    captured = capsys.readouterr()
    assert words in captured.err
    assert captured.out == ""


@pytest.mark.parametrize(
    ("package", "command"), [("matplotlib", "positions"), ("jinja2", "report")]
)
def test_missing_package(package: str, command: str, tmp_path: Path, random_run: Path) -> None:
    """Stops a traceback where the extra is not installed."""
    run = made_run(tmp_path, "run", random_run)
    given = {
        "positions": ["positions", "--output", "p.svg"],
        "report": ["report", str(run), "--lines", "0"],
    }[command]
    code = f"import sys; sys.modules[{package!r}] = None; from mttrain.cli import main; "
    answer = subprocess.run(
        [sys.executable, "-c", f"{code}sys.exit(main(sys.argv[1:]))", *given],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[2])},
        capture_output=True,
        text=True,
        check=False,
    )
    assert answer.returncode == 2
    assert "pip install 'mttrain[report]'" in answer.stderr
    assert "Traceback" not in answer.stderr


# ---- attention --------------------------------------------------------------------------------


def test_pictures_are_written(tmp_path: Path, random_run: Path, capsys: Capture) -> None:
    for name, begin in (("a.svg", b"<?xml"), ("a.png", b"\x89PNG")):
        path = tmp_path / name
        arguments = ["the small house.", "--kind", "all", "--output", str(path)]
        assert main(["attention", str(random_run), *arguments]) == 0
        assert path.read_bytes().startswith(begin)
    assert capsys.readouterr().out == ""
    svg = (tmp_path / "a.svg").read_text(encoding="utf-8")
    for kind in ("encoder", "decoder", "cross"):
        for head in (1, 2):
            assert f">{kind}, layer 1, head {head}<" in svg


def test_one_line_for_each_line(
    tmp_path: Path, random_run: Path, files: Files, capsys: Capture
) -> None:
    """Blank in, blank out; more lines than a batch; the text is that of translate."""
    lines = ["the small house.", "", "dog", "  "] * 40
    path = files("in.txt", lines)
    assert main(["attention", str(random_run), "--input", path, "--format", "pharaoh"]) == 0
    found = capsys.readouterr().out.split("\n")
    assert found.pop() == ""
    assert len(found) == len(lines)
    assert all(not found[n] for n, line in enumerate(lines) if not line.strip())
    assert len(set(found[0::4])) == 1
    output = tmp_path / "out.jsonl"
    arguments = ["--input", path, "--format", "json", "--kind", "all", "--output", str(output)]
    assert main(["attention", str(random_run), *arguments]) == 0
    objects = [json.loads(line) for line in output.read_text(encoding="utf-8").splitlines()]
    assert [one["line"] for one in objects] == list(range(1, len(lines) + 1))
    assert [" ".join(one["alignment"]) for one in objects] == found
    assert main(["translate", "--model", str(random_run), "--input", path]) == 0
    assert capsys.readouterr().out.split("\n")[:-1] == [one["target"] for one in objects]


def test_json_weights(random_run: Path, capsys: Capture) -> None:
    arguments = ["the house.", "--target", "ein Haus.", "--format", "json", "--kind", "all"]
    assert main(["attention", str(random_run), *arguments]) == 0
    content = json.loads(capsys.readouterr().out)
    tokens = content["tokens"]
    assert content["target"] == "ein Haus."
    assert tokens["written"][-1] == tokens["source"][-1] == "</s>"
    sizes = {"encoder": ("source",) * 2, "decoder": ("read",) * 2, "cross": ("read", "source")}
    for kind, (rows, columns) in sizes.items():
        (layer,) = content["weights"][kind]
        assert len(layer) == len(content["heads"]) == 2
        for head in layer:
            assert [len(row) for row in head] == [len(tokens[columns])] * len(tokens[rows])
            assert [sum(row) for row in head] == pytest.approx([1.0] * len(head), abs=1e-4)


def test_files_out_of_step(random_run: Path, files: Files, capsys: Capture) -> None:
    source, target = files("a", ["x", "y"]), files("b", ["x"])
    arguments = ["--input", source, "--target-input", target, "--format", "pharaoh"]
    assert main(["attention", str(random_run), *arguments]) == 3
    assert "has 2 lines" in capsys.readouterr().err


def test_copy_model_aligns_each_word_with_itself(tmp_path: Path, capsys: Capture) -> None:
    """Ground truth: a model that has learned to copy must link word n with word n."""
    lines = random_sentences(2500, seed=1, shortest=2, longest=6, words=20)
    held = random_sentences(40, seed=2, shortest=2, longest=6, words=20)
    data = {
        "train": write_pairs(tmp_path, "train", [(line, line) for line in lines]),
        "valid": write_pairs(tmp_path, "valid", [(line, line) for line in held]),
    }
    config = tiny_config(
        tmp_path,
        data,
        tokenizer={"vocab_size": 300},
        model={"dropout": 0.0},
        optim={"lr": 5e-3, "warmup_steps": 40},
        train={"max_steps": 450, "valid_every": 450, "batch_tokens": 600, "log_every": 50},
    )
    train(config)
    run = config.run_dir
    outputs = Translator.load(run).translate(held)
    right = [n for n, line in enumerate(held) if outputs[n] == line]
    assert len(right) >= 30, "the model has not learned to copy"
    capsys.readouterr()
    path = str(data["valid"]["source"])
    arguments = ["--input", path, "--target-input", path, "--format", "pharaoh"]
    assert main(["attention", run, *arguments]) == 0
    found = capsys.readouterr().out.splitlines()
    links = [link for n in right for link in found[n].split()]
    same = [link for link in links if link.split("-")[0] == link.split("-")[1]]
    assert len(same) >= 0.9 * sum(len(held[n].split()) for n in right)


# ---- positions --------------------------------------------------------------------------------


def test_positions(tmp_path: Path, capsys: Capture) -> None:
    table = sinusoidal_positions(0, 5, 8)
    arguments = ["positions", "--d-model", "8", "--length", "5"]
    assert main([*arguments, "--format", "text"]) == 0
    rows = [line.split("\t") for line in capsys.readouterr().out.splitlines()]
    for row, expected in zip(rows, table.tolist(), strict=True):
        assert [float(value) for value in row] == pytest.approx(expected, abs=1e-6)
    assert main([*arguments, "--format", "json"]) == 0
    content = json.loads(capsys.readouterr().out)
    # The first row is sines of 0 and cosines of 0: its products sum up the cosine columns.
    sums = table[:, 1::2].sum(1).tolist()
    assert content["dot_product_by_distance"] == pytest.approx(sums, abs=1e-5)
    assert main([*arguments, "--output", str(tmp_path / "p.png")]) == 0
    assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")
