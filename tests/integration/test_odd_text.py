"""Odd bytes on their way through all four commands: tokenize, train, translate, eval."""

from __future__ import annotations

import hashlib
import io
import sys
from pathlib import Path

import pytest

from mttrain.checkpoint import load_model
from mttrain.cli import main
from mttrain.config import dump_config
from mttrain.runlog import read_log
from tests.integration.training_help import random_sentences, tiny_config

Capture = pytest.CaptureFixture[str]
SEPARATORS = ("\u2028", "\u2029", "\u0085", "\x0b", "\x0c", "\x1c", "\x1d", "\x1e", "\r", "\x00")


class Workbench:
    """A folder with a corpus of given bytes, and the commands run on it."""

    def __init__(self, folder: Path, source: bytes, target: bytes) -> None:
        folder.mkdir()
        self.folder = folder
        self.source, self.target = folder / "text.src", folder / "text.tgt"
        self.source.write_bytes(source)
        self.target.write_bytes(target)

    def train(self) -> Path:
        """Two updates; the run directory."""
        pair = {"source": str(self.source), "target": str(self.target)}
        config = tiny_config(
            self.folder,
            {"train": pair, "valid": pair},
            train={"max_steps": 2, "valid_every": 2, "log_every": 1},
        ).model_copy(update={"threads": 1})
        path = self.folder / "run.yaml"
        path.write_text(dump_config(config), encoding="utf-8")
        assert main(["train", "--config", str(path)]) == 0
        return Path(config.run_dir)

    def weights_hash(self) -> str:
        run = self.train()
        state = dict(load_model(run / "checkpoints" / "step-00000002").model.named_parameters())
        digest = hashlib.sha256()
        for name in sorted(state):
            digest.update(state[name].detach().numpy().tobytes())
        return digest.hexdigest()

    def pairs_used(self) -> int:
        records = read_log(self.folder / "run" / "log.jsonl")
        return int(next(r for r in records if r["kind"] == "encoded")["pairs"])


def as_bytes(lines: list[str]) -> bytes:
    return "".join(f"{line}\n" for line in lines).encode()


def test_line_boundaries_that_are_none(tmp_path: Path, capsys: Capture) -> None:
    """T01, T03, T06: only LF ends a line, in every command; NUL and lone CR shift nothing."""
    plain = random_sentences(30, seed=2, shortest=2)
    odd = [f"{line} A{mark}B" for line, mark in zip(plain, SEPARATORS, strict=False)]
    lines = odd + plain[len(odd) :]
    bench = Workbench(tmp_path / "odd", as_bytes(lines), as_bytes(lines))
    vocabulary = str(tmp_path / "tok.json")
    assert main(["tokenize", str(bench.source), "--vocab-size", "300", "--output", vocabulary]) == 0
    report = capsys.readouterr()
    assert f"{len(lines)} lines" in report.out + report.err
    run = bench.train()
    assert bench.pairs_used() == len(lines)
    capsys.readouterr()
    output = tmp_path / "out.txt"
    arguments = ["--model", str(run), "--input", str(bench.source), "--output", str(output)]
    assert main(["translate", *arguments, "--beam", "1", "--max-length", "8"]) == 0
    assert output.read_bytes().count(b"\n") == len(lines)
    capsys.readouterr()
    assert main(["eval", "--hyp", str(bench.source), "--ref", str(bench.target)]) == 0
    assert "= 100.0" in capsys.readouterr().out


@pytest.mark.parametrize("kind", ["crlf", "bom", "no_final_newline"])
def test_file_forms_that_mean_the_same(tmp_path: Path, kind: str, capsys: Capture) -> None:
    """T04, T05, T11: CRLF, a byte order mark, or no final LF give the ids, the model and the score
    of the plain file."""
    lines = random_sentences(20, seed=3, shortest=2)
    plain = as_bytes(lines)
    changed = {
        "crlf": plain.replace(b"\n", b"\r\n"),
        "bom": b"\xef\xbb\xbf" + plain,
        "no_final_newline": plain[:-1],
    }[kind]
    first = Workbench(tmp_path / "plain", plain, plain)
    second = Workbench(tmp_path / "changed", changed, plain)
    assert first.weights_hash() == second.weights_hash()
    names = [bench.folder / "run" / "tokenizer.json" for bench in (first, second)]
    assert names[0].read_bytes() == names[1].read_bytes()
    outputs = []
    for bench in (first, second):
        output = bench.folder / "out.txt"
        run = str(first.folder / "run")
        arguments = ["--model", run, "--input", str(bench.source), "--output", str(output)]
        assert main(["translate", *arguments, "--beam", "2", "--max-length", "9"]) == 0
        outputs.append(output.read_bytes())
    assert outputs[0] == outputs[1] and b"\r" not in outputs[0]
    capsys.readouterr()
    assert main(["eval", "--hyp", str(second.source), "--ref", str(first.target)]) == 0
    assert "= 100.0" in capsys.readouterr().out


def test_invalid_utf8(tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    """T07: training stops with file, line and byte; translate replaces, counts, and loses none."""
    lines = as_bytes(random_sentences(10, seed=4, shortest=2)).split(b"\n")[:-1]
    good = Workbench(tmp_path / "good", b"\n".join(lines) + b"\n", b"\n".join(lines) + b"\n")
    run = good.train()
    broken = [*lines[:6], b"caf\xe9 ouvert", *lines[7:]]
    bad = Workbench(tmp_path / "bad", b"\n".join(broken) + b"\n", b"\n".join(lines) + b"\n")
    pair = {"source": str(bad.source), "target": str(bad.target)}
    path = tmp_path / "bad.yaml"
    path.write_text(dump_config(tiny_config(bad.folder, {"train": pair, "valid": pair})))
    capsys.readouterr()
    assert main(["train", "--config", str(path)]) == 3
    error = capsys.readouterr().err
    assert str(bad.source) in error and "line 7" in error and "byte" in error
    assert not (bad.folder / "run" / "checkpoints").exists()
    stdin = io.TextIOWrapper(io.BytesIO(b"\n".join(broken) + b"\nba \xe2\x82"))
    monkeypatch.setattr(sys, "stdin", stdin)
    assert main(["translate", "--model", str(run), "--beam", "1", "--max-length", "5"]) == 0
    captured = capsys.readouterr()
    assert captured.out.count("\n") == len(lines) + 1
    assert "2 lines" in captured.err or "lines 7, 11" in captured.err
