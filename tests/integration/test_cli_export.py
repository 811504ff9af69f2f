"""`mttrain export` at the command line: options, streams, refusals before anything is loaded."""

from __future__ import annotations

import json
import os
import resource
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from mttrain.cli import main
from mttrain.exporting import MARKER

Capture = pytest.CaptureFixture[str]
Files = Callable[..., str]
SOURCES = ["the small house.", "", "a dog", "läuft"]


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


def test_export_for_huggingface(
    random_run: Path, files: Files, tmp_path: Path, capsys: Capture
) -> None:
    """The report was mixed with progress, or the directory could not be used."""
    transformers = pytest.importorskip("transformers")
    out = tmp_path / "out"
    command = ["export", str(random_run), str(out), "--to", "huggingface"]
    command += ["--lines", files("src", SOURCES)]
    assert main(command) == 0
    stdout, stderr = capsys.readouterr()
    first = stdout.split("\n")[0]
    assert first.startswith(f"{out} (huggingface): 3 of 3 lines translated alike, logits differ")
    assert "fill in the licence" in stdout and "comparing translations of 3 lines" in stderr
    assert "%|" not in stderr and "arning" not in stderr

    assert main(command) == 2
    assert capsys.readouterr().err.endswith(
        "is an earlier export; add --replace, or name another.\n"
    )
    assert main([*command, "--replace", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["path"] == str(out) and report["format"] == "huggingface"
    assert report["lines"] == report["equal"] == 3 and 0 <= report["largest_difference"] <= 1e-4
    assert json.loads((out / MARKER).read_text("utf-8"))["equal"] == 3
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "src"]

    # The run's decode section: beam 2, length penalty 0.5, at most 12 tokens.
    assert main(["translate", "--model", str(random_run), "--input", str(tmp_path / "src")]) == 0
    wanted = capsys.readouterr().out.split("\n")[:-1]
    tokenizer = transformers.AutoTokenizer.from_pretrained(out)
    model = transformers.AutoModelForSeq2SeqLM.from_pretrained(out)
    lines = [line for line in SOURCES if line]
    ids = model.generate(**tokenizer(lines, return_tensors="pt", padding=True))
    found = tokenizer.batch_decode(ids, skip_special_tokens=True)
    assert found == [text for text in wanted if text] and len(found) == 3


@pytest.mark.parametrize(
    ("options", "status", "words"),
    [
        ([], 2, "Name the format: --to ctranslate2 or --to huggingface."),
        (["--to", "onnx"], 2, "onnx"),
        (["--to", "huggingface", "--quantization", "int8"], 2, "only with --to ctranslate2"),
        (["--to", "huggingface", "--lines", "nowhere.txt"], 3, "nowhere.txt: no such file."),
        (["--to", "huggingface"], 2, "give some with --lines F"),
    ],
    ids=str,
)
def test_refused(
    options: list[str], status: int, words: str, random_run: Path, tmp_path: Path, capsys: Capture
) -> None:
    assert main(["export", str(random_run), str(tmp_path / "out"), *options]) == status
    stdout, stderr = capsys.readouterr()
    assert words in stderr and not stdout and not list(tmp_path.iterdir())


def test_a_model_that_is_none(files: Files, tmp_path: Path, capsys: Capture) -> None:
    lines = files("src", SOURCES)
    command = ["export", str(tmp_path), str(tmp_path / "out"), "--to", "huggingface"]
    assert main([*command, "--lines", lines]) == 4
    assert "holds no checkpoint" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["src"]


def test_the_run_itself_is_not_the_output(random_run: Path, files: Files, capsys: Capture) -> None:
    """The trained model was replaced by its own export."""
    before = sorted(os.walk(random_run))
    command = ["export", str(random_run), str(random_run), "--to", "huggingface", "--replace"]
    assert main([*command, "--lines", files("src", SOURCES)]) == 2
    assert "holds files that are no export" in capsys.readouterr().err
    assert sorted(os.walk(random_run)) == before


def test_without_transformers(
    random_run: Path, files: Files, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    """A missing optional package was a traceback."""
    monkeypatch.setitem(sys.modules, "transformers", None)
    command = ["export", str(random_run), str(tmp_path / "out"), "--to", "huggingface"]
    assert main([*command, "--lines", files("src", SOURCES)]) == 2
    assert "pip install 'mttrain[export]'" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_full_disk(random_run: Path, files: Files, tmp_path: Path, capsys: Capture) -> None:
    """The library's own error, or a part of the directory, was left; no file may pass the limit."""
    pytest.importorskip("transformers")
    lines = files("src", SOURCES)
    command = ["export", str(random_run), str(tmp_path / "out"), "--to", "huggingface"]
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, limits[1]))
    try:
        status = main([*command, "--lines", lines])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert status == 3
    last = capsys.readouterr().err.split("\n")[-2]
    assert last.startswith("error: ") and "out: cannot write the export: " in last
    assert [path.name for path in tmp_path.iterdir()] == ["src"]
