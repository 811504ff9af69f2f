"""`translate` and `eval` with `--engine ctranslate2`: the same contract, what is refused, and the
directories that are made of checkpoints and kept."""

from __future__ import annotations

import json
import shutil
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mttrain.checkpoint import Index, write_index
from mttrain.cli import main
from mttrain.config import load_config
from mttrain.ct2_cache import load_ctranslate2
from mttrain.ct2_engine import Ct2Engine
from mttrain.ct2_files import MODEL_FILE
from mttrain.rundir import WEIGHTS
from mttrain.runsetup import write_config
from mttrain.tokenizer import train_tokenizer
from tests.parity.ct2_help import one_sentence, saved, sentences, transformer

pytest.importorskip("ctranslate2")

Capture = pytest.CaptureFixture[str]
Files = Callable[..., str]
LINES = [*sentences(20, 8, seed=21), "", "</s> <pad>", "  ", *sentences(3, 40, seed=22)]


def make_run(folder: Path, seed: int = 1, says: str = "") -> Path:
    """A run directory with a random model whose outputs hang on their sources, or one that always
    says the same."""
    tokenizer = train_tokenizer(sentences(200, 20), vocab_size=300)
    model = one_sentence(tokenizer, says) if says else transformer(tokenizer, seed=seed)
    config = folder / "run.yaml"
    side = "{source: a.en, target: a.de}"
    data = f"{{source_lang: en, target_lang: de, train: {side}, valid: {side}}}"
    config.write_text(f"run_dir: {folder}\ndata: {data}\ntrain: {{max_steps: 1}}\n")
    checkpoint = saved(
        folder,
        model,
        tokenizer,
        decode={"beam": 3, "length_penalty": 0.7, "max_length": None},
    )
    write_index(folder, Index().added(checkpoint.name, {"bleu": 1.0}))
    write_config(load_config(str(config)))
    return folder


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose directories are made (to be read only)."""
    run = make_run(tmp_path_factory.mktemp("made"))
    load_ctranslate2(run, device="cpu")
    return run


@pytest.fixture
def run(made: Path, tmp_path: Path) -> Path:
    """A run of which no directory was made yet."""
    shutil.copytree(made, tmp_path / "run", ignore=shutil.ignore_patterns("exports"))
    return tmp_path / "run"


def translate(run: Path, *options: str) -> int:
    return main(["translate", "--model", str(run), "--device", "cpu", *options])


def rows(capsys: Capture) -> list[str]:
    return capsys.readouterr().out.split("\n")[:-1]


@pytest.mark.parametrize(
    "options",
    [
        [],
        ["--beam", "1"],
        ["--max-length", "5"],
        ["--batch-size", "1"],
        ["--batch-tokens", "90"],
        ["--split-long", "--max-source-length", "20"],
        ["--max-source-length", "9", "--length-penalty", "0"],
        ["--format", "jsonl", "--nbest", "3"],
        ["--scores"],
        ["--beam", "1", "--min-length", "5", "--no-repeat-ngram", "2", "--format", "jsonl"],
    ],
    ids=" ".join,
)
def test_the_same_lines(made: Path, files: Files, capsys: Capture, options: list[str]) -> None:
    """N lines in, N out, with the same ids, flags and scores as from our own engine; what is left
    open comes from the decode section of the checkpoint."""
    text = files("in", LINES)
    found = []
    for engine in ("torch", "ctranslate2"):
        assert translate(made, "--engine", engine, "--input", text, *options) == 0
        captured = capsys.readouterr()
        # The counts of the summary too, but not its time.
        summary = captured.err.splitlines()
        found.append((captured.out.split("\n")[:-1], summary[0].split(", in ")[0], summary[1:]))
    ours, theirs = found
    assert ours[1:] == theirs[1:]
    assert len(theirs[0]) == len(LINES)
    for one, other in zip(ours[0], theirs[0], strict=True):
        assert plain(one, options) == plain(other, options)


def plain(row: str, options: list[str]) -> Any:
    """A row without the last digits of its scores."""
    if "--format" in options:
        content = json.loads(row)
        for item in (content, *content.get("hypotheses", ())):
            for name in ("score", "ranked"):
                item[name] = pytest.approx(item[name], abs=1e-3)
        return content
    if "--scores" in options:
        number, text, *scores = row.split(" ||| ")
        return number, text, [pytest.approx(float(score), abs=1e-3) for score in scores]
    return row


def test_prefixes(made: Path, files: Files, capsys: Capture) -> None:
    text, prefix = files("in", LINES), files("p", ["ein" if line else "" for line in LINES])
    options = ("--input", text, "--prefix", prefix, "--beam", "1")
    found = []
    for engine in ("torch", "ctranslate2"):
        assert translate(made, "--engine", engine, *options) == 0
        found.append(rows(capsys))
    assert found[0] == found[1] and found[1][0].startswith("ein")
    assert translate(made, "--engine", "ctranslate2", "--input", text, "--prefix", text) == 0
    short = files("short", ["a"])
    assert translate(made, "--engine", "ctranslate2", "--input", text, "--prefix", short) == 3


def test_int8(tmp_path: Path, files: Files, capsys: Capture) -> None:
    """--precision int8 is the library's, with weights of its own directory; a directory of int8
    weights stays int8 unless another precision is asked for."""
    run = make_run(tmp_path, says="the dog")
    text = files("in", ["Hund"])
    options = ("--engine", "ctranslate2", "--precision", "int8", "--beam", "1", "--input", text)
    assert translate(run, *options) == 0
    assert rows(capsys) == ["the dog"]
    (folder,) = kept(run)
    assert folder.name.startswith("ctranslate2-int8-")
    for precision, kind in (("auto", "int8_float32"), ("fp32", "float32")):
        engine = load_ctranslate2(folder, device="cpu", precision=precision).engine
        assert isinstance(engine, Ct2Engine) and engine.compute_type == kind


def test_eval(made: Path, files: Files, capsys: Capture) -> None:
    """Scores, likelihood and the name of the engine."""
    lines = [line for line in LINES if line.strip()]
    source, ref = files("s", lines), files("r", lines[::-1])
    results = []
    for engine in ("torch", "ctranslate2"):
        options = ["--model", str(made), "--source", source, "--ref", ref, "--engine", engine]
        assert main(["eval", *options, "--device", "cpu", "--json"]) == 0
        results.append(json.loads(capsys.readouterr().out))
    ours, theirs = results
    assert (ours.pop("engine"), theirs.pop("engine")) == ("torch", "ctranslate2")
    assert theirs.pop("nll") == pytest.approx(ours.pop("nll"), abs=1e-4)
    assert theirs.pop("perplexity") == pytest.approx(ours.pop("perplexity"), rel=1e-3)
    assert ours == theirs
    assert main(["eval", *options, "--device", "cpu"]) == 0
    assert " (ctranslate2): beam 3" in capsys.readouterr().err
    assert main(["eval", "--hyp", source, "--ref", ref, "--engine", "torch"]) == 2
    assert "--engine" in capsys.readouterr().err


# ---- what is refused ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--sample"], "--sample does not work with CTranslate2"),
        (["--sample", "--seed", "3", "--temperature", "0.5"], "--sample does not work"),
        (["--min-length", "3"], "--min-length with --beam 3 is not the same"),
        (["--no-repeat-ngram", "3"], "--no-repeat-ngram with --beam 3 is not the same"),
        (["--model", "other"], "CTranslate2 runs one model, not an ensemble"),
        (["--device", "mps"], "device 'mps' is unknown to the ctranslate2 engine"),
        (["--device", "cuda:99"], "device 'cuda:99': this CTranslate2 sees"),
        (["--precision", "fp16"], "precision fp16: CTranslate2 has no float16 on this cpu device"),
    ],
)
def test_refused_before_anything_is_made(
    run: Path, files: Files, capsys: Capture, options: list[str], words: str
) -> None:
    """Stops an option from being dropped in silence, or refused after minutes of work."""
    device = [] if "--device" in options else ["--device", "cpu"]
    command = ["translate", "--model", str(run), "--engine", "ctranslate2", *device]
    assert main([*command, "--input", files("in", ["a"]), *options]) == 2
    captured = capsys.readouterr()
    assert words in captured.err and captured.out == ""
    assert not (run / "exports").exists()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--max-length", "5000"], "may need 5000 positions, but this CTranslate2 directory has"),
        (["--max-source-length", "2000"], "--max-source-length 2000 with --max-length not set"),
        (["--beam", "149"], "--beam 149 is more than half of the vocabulary"),
    ],
)
def test_beyond_the_directory(
    made: Path, files: Files, capsys: Capture, options: list[str], words: str
) -> None:
    text = files("in", ["a"])
    assert translate(made, "--engine", "ctranslate2", "--input", text, *options) == 2
    assert words in capsys.readouterr().err


@pytest.mark.parametrize("command", ["translate", "eval"])
def test_without_the_package(
    run: Path, files: Files, capsys: Capture, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    """One sentence with the command that installs it; the status is that of wrong usage."""
    monkeypatch.setitem(sys.modules, "ctranslate2", None)
    text = files("in", ["a"])
    what = ["--input", text] if command == "translate" else ["--source", text, "--ref", text]
    options = ["--model", str(run), "--engine", "ctranslate2", "--device", "cpu"]
    assert main([command, *options, *what]) == 2
    assert "pip install 'mttrain[export]'" in capsys.readouterr().err
    assert main(["export", str(run), str(run / "out"), "--to", "ctranslate2", "--lines", text]) == 2
    assert "pip install 'mttrain[export]'" in capsys.readouterr().err
    assert not (run / "out").exists()


# ---- exported directories -----------------------------------------------------------------------


def test_an_exported_directory_is_a_model(
    run: Path, tmp_path: Path, files: Files, capsys: Capture
) -> None:
    """It names its engine itself, moves, and needs nothing of the run."""
    text, out = files("in", LINES), tmp_path / "out"
    command = ["export", str(run), str(out), "--to", "ctranslate2", "--lines", text, "--json"]
    assert main(command) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["equal"] == report["lines"] == len([x for x in LINES if x.strip()])
    assert translate(run, "--input", text) == 0
    wanted = rows(capsys)
    moved = out.rename(tmp_path / "moved")
    shutil.rmtree(run)
    assert translate(moved, "--input", text) == 0
    assert rows(capsys) == wanted
    assert translate(moved, "--input", text, "--engine", "ctranslate2", "--beam", "2") == 0
    assert main(["eval", "--model", str(moved), "--source", text, "--ref", text]) == 0
    capsys.readouterr()
    assert translate(moved, "--input", text, "--engine", "torch") == 2
    assert "--engine torch cannot load it" in capsys.readouterr().err
    assert translate(moved, "--input", text, "--model", str(moved)) == 2
    assert "not an ensemble" in capsys.readouterr().err
    again = ["export", str(moved), str(tmp_path / "again"), "--to", "ctranslate2"]
    assert main([*again, "--lines", text]) == 4
    assert "moved is an export; give the run or checkpoint" in capsys.readouterr().err
    (moved / MODEL_FILE).write_bytes(b"nothing")
    assert translate(moved, "--input", text) == 4
    assert "model.bin is damaged" in capsys.readouterr().err


# ---- directories that are kept ------------------------------------------------------------------


def kept(run: Path) -> list[Path]:
    return sorted((run / "exports").glob("ctranslate2-*"))


def test_made_once(run: Path, files: Files, capsys: Capture) -> None:
    """The second start finds what the first made; another checkpoint does not."""
    text = files("in", LINES)
    answers = []
    for told in (True, False, False):
        assert translate(run, "--engine", "ctranslate2", "--input", text) == 0
        captured = capsys.readouterr()
        assert ("once for this checkpoint" in captured.err) is told
        answers.append(captured.out)
    assert len(kept(run)) == 1 and len(set(answers)) == 1
    shutil.rmtree(run / "checkpoints")
    make_run(run, seed=2)  # the same names, other weights
    assert translate(run, "--engine", "ctranslate2", "--input", text) == 0
    captured = capsys.readouterr()
    assert "once for this checkpoint" in captured.err and len(kept(run)) == 2
    assert translate(run, "--input", text) == 0
    assert capsys.readouterr().out == captured.out != answers[0]


@pytest.mark.parametrize("name", [MODEL_FILE, "meta.json", "tokenizer.json"])
def test_damage_is_mended(run: Path, files: Files, capsys: Capture, name: str) -> None:
    """A file that is shorter, or a file that is gone, makes the directory new."""
    text = files("in", LINES[:5])
    assert translate(run, "--engine", "ctranslate2", "--input", text) == 0
    wanted = capsys.readouterr().out
    (folder,) = kept(run)
    (folder / name).write_bytes((folder / name).read_bytes()[:-5])
    for told in (True, False):
        assert translate(run, "--engine", "ctranslate2", "--input", text) == 0
        captured = capsys.readouterr()
        assert captured.out == wanted and ("once for this" in captured.err) is told
    (folder / name).unlink()
    assert translate(run, "--engine", "ctranslate2", "--input", text) == 0
    assert capsys.readouterr().out == wanted and kept(run) == [folder]


def test_a_damaged_checkpoint_is_no_old_acquaintance(
    run: Path, files: Files, capsys: Capture
) -> None:
    """Stops a directory of earlier weights from hiding that those of the checkpoint are damaged."""
    text = files("in", ["a"])
    assert translate(run, "--engine", "ctranslate2", "--input", text) == 0
    (weights,) = run.glob(f"checkpoints/*/{WEIGHTS}")
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    capsys.readouterr()
    assert translate(run, "--engine", "ctranslate2", "--input", text) == 4
    assert f"{WEIGHTS} is damaged" in capsys.readouterr().err


def test_several_makers(run: Path) -> None:
    """One makes, the others wait and find it: nobody sees a half or removes another's."""
    told: list[str] = []
    texts: list[list[str]] = []
    errors: list[BaseException] = []
    barrier = threading.Barrier(4)

    def work() -> None:
        try:
            barrier.wait()
            translator = load_ctranslate2(run, device="cpu", tell=told.append)
            texts.append(translator.translate(["the dog"]))
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors and len(told) == 1
    assert len(kept(run)) == 1 and texts == [texts[0]] * 4


def test_where_the_run_cannot_be_written(
    run: Path, tmp_path: Path, files: Files, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Then the user's cache keeps the directory; without one it is made for the command alone.

    A file in the way of the folder stands for missing rights, which root does not lack."""
    text = files("in", ["the dog"])
    cache = tmp_path / "cache"
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    (run / "exports").write_text("in the way")
    for told in (True, False):
        assert translate(run, "--engine", "ctranslate2", "--input", text) == 0
        assert ("once for this checkpoint" in capsys.readouterr().err) is told
    assert list(cache.glob("mttrain/ctranslate2-float32-*"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(run / "exports"))
    assert translate(run, "--engine", "ctranslate2", "--input", text) == 0
    captured = capsys.readouterr()
    assert "for this command alone" in captured.err and len(captured.out.splitlines()) == 1


def test_a_checkpoint_outside_a_run(
    run: Path, tmp_path: Path, files: Files, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is written beside it."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (checkpoint,) = (run / "checkpoints").glob("step-*")
    alone = shutil.copytree(checkpoint, tmp_path / "alone" / "model")
    before = sorted(alone.iterdir())
    text = files("in", ["the dog"])
    assert translate(alone, "--engine", "ctranslate2", "--input", text) == 0
    assert len(rows(capsys)) == 1
    assert sorted(alone.iterdir()) == before and list(alone.parent.iterdir()) == [alone]
