"""What the commands refuse before they work: lost files, other languages, wrong kinds of input."""

from __future__ import annotations

import io
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mttrain.cli import main

Capture = pytest.CaptureFixture[str]
Files = Callable[..., str]


@pytest.mark.parametrize("option", ["input", "prefix"])
def test_translate_spares_its_input(
    option: str, random_run: Path, files: Files, capsys: Capture, tmp_path: Path
) -> None:
    """`--output` that was the input replaced the source text; also under another spelling."""
    text, link = files("text", ["a dog"]), tmp_path / "link"
    link.symlink_to(text)
    source = text if option == "input" else files("source", ["a dog"])
    arguments = ["translate", "--model", str(random_run), "--input", source]
    if option == "prefix":
        arguments += ["--prefix", text]
    for output in (text, str(link), f"{tmp_path}/./text"):
        assert main([*arguments, "--output", output]) == 2
        assert capsys.readouterr().err == (
            f"error: --output is the {option} file ({text}); name another.\n"
        )
    assert Path(text).read_text(encoding="utf-8") == "a dog\n"


def test_eval_and_encode_spare_their_input(random_run: Path, files: Files, capsys: Capture) -> None:
    """The same for the reference of `eval` and the text of `encode`."""
    source, ref = files("source", ["a dog"]), files("ref", ["ein Hund"])
    model = ["--model", str(random_run)]
    arguments = ["eval", *model, "--source", source, "--ref", ref, "--output"]
    assert main([*arguments, ref]) == 2 and main([*arguments, source]) == 2
    assert main(["encode", *model, "--input", source, "--output", source]) == 2
    assert capsys.readouterr().err.count("error: --output is the ") == 3


def test_tokenize_spares_text(files: Files, capsys: Capture, tmp_path: Path) -> None:
    """`tokenize a b --output b`, a forgotten name, replaced text by a vocabulary."""
    first, last = files("a", ["the dog"]), files("b", ["the house"])
    notes, output = files("notes", ["mine"]), str(tmp_path / "t.json")
    arguments = ["tokenize", first, last, "--vocab-size", "262", "--output"]
    assert main([*arguments, last]) == 2
    assert f"--output is the input file ({last})" in capsys.readouterr().err
    assert main([*arguments, notes]) == 2
    assert f"--output {notes} exists and is no tokenizer" in capsys.readouterr().err
    assert Path(notes).read_text(encoding="utf-8") == "mine\n"
    assert main([*arguments, output]) == 0 and main([*arguments, output]) == 0


def test_eval_refuses_another_language(random_run: Path, files: Files, capsys: Capture) -> None:
    """`--lang fr` for a model into German was believed."""
    source = files("source", ["a dog"])
    arguments = ["eval", "--model", str(random_run), "--source", source, "--ref", source]
    assert main([*arguments, "--lang", "fr"]) == 2
    assert f"{random_run} translates into de, not fr; remove --lang" in capsys.readouterr().err
    assert main([*arguments, "--lang", "de-AT", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["lang"] == "de-AT"
    assert main(["eval", "--hyp", source, "--ref", source, "--lang", "Klingon"]) == 0
    assert "warning: --lang Klingon is not a language code" in capsys.readouterr().err


def test_translate_names_packed_and_prefix_files(
    random_run: Path, files: Files, capsys: Capture
) -> None:
    """A .docx was translated as garbage; and which file held too few prefixes was not said."""
    packed = files("text.docx", b"PK\x03\x04\x14\n")
    arguments = ["translate", "--model", str(random_run), "--input"]
    assert main([*arguments, packed]) == 3
    assert f"error: {packed}: this is a packed (zip) file" in capsys.readouterr().err
    text, prefix = files("text", ["a", "b"]), files("prefix", ["ein"])
    assert main([*arguments, text, "--prefix", prefix]) == 3
    assert f"error: {prefix}: Only 1 prefix for 2 or more" in capsys.readouterr().err


def test_a_terminal_is_told_that_it_is_read(
    random_run: Path, monkeypatch: Any, capsys: Capture
) -> None:
    """`translate` without --input seemed to hang."""
    stdin = io.TextIOWrapper(io.BytesIO(b"a dog\n"))
    monkeypatch.setattr(stdin, "isatty", lambda: True, raising=False)
    monkeypatch.setattr(sys, "stdin", stdin)
    assert main(["translate", "--model", str(random_run)]) == 0
    err = capsys.readouterr().err
    assert err.startswith(f"reading standard input; end with Ctrl-D{os.linesep}")


@pytest.mark.parametrize(
    ("arguments", "hint"),
    [
        (["train", "x.yaml"], "Use --config x.yaml."),
        (["translate", "--model", "a", "--beam", "2", "x"], "Use --input x."),
        (["encode", "x"], "Use --input x."),
        (["eval", "--model", "a", "b"], "For an ensemble repeat --model: --model a --model b."),
        (["translate", "--model", "a", "README.md"], "Use --input README.md."),
        (["eval", "x"], "Try 'mttrain eval --help'."),
    ],
)
def test_a_forgotten_option_name_is_told(arguments: list[str], hint: str, capsys: Capture) -> None:
    """`--model a b` and `train x.yaml` were answered by "unexpected extra argument" alone."""
    assert main(arguments) == 2
    first, second = capsys.readouterr().err.splitlines()
    assert first.startswith("error: Got unexpected extra argument") and second == hint
