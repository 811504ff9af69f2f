"""`mttrain init` and `mttrain config` through the command line."""

from __future__ import annotations

import gzip
import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from mttrain.cli import main
from mttrain.config import load_config
from mttrain.corpus import read_lines, read_pairs
from mttrain.rundir import read_index
from mttrain.schema import SCHEMA_FILE, schema_text
from tests.integration.training_help import random_sentences

Capture = pytest.CaptureFixture[str]
Write = Callable[..., str]


@pytest.fixture
def corpus(files: Write) -> tuple[str, str]:
    """200 different pairs."""
    lines = random_sentences(200, 5, shortest=5)
    assert len(set(lines)) == 200
    return files("train.en", lines), files("train.de", [line[::-1].strip() for line in lines])


def run(*args: str | Path) -> int:
    return main([str(arg) for arg in args])


def refused(capsys: Capture, *args: str | Path) -> str:
    """The one line of an error, with the exit status before it."""
    status = run(*args)
    output = capsys.readouterr()
    lines = [line for line in output.err.splitlines() if line.startswith("error: ")]
    assert status in (2, 3) and len(lines) == 1, output.err
    return f"{status} {lines[0].removeprefix('error: ')}"


# ---- init -------------------------------------------------------------------------------------


def test_init_cuts_and_trains(
    corpus: tuple[str, str], tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The whole way: a file that loads, splits without overlap, a run that trains and is scored."""
    monkeypatch.chdir(tmp_path)
    before = [Path(name).read_bytes() for name in corpus]
    assert run("init", "train.en", "train.de", "--test", "7", "--output", "my.yaml", "--json") == 0
    result = json.loads(capsys.readouterr().out)
    assert [Path(name).read_bytes() for name in corpus] == before
    config = load_config("my.yaml")
    assert result["config"] == config.model_dump(mode="json")
    assert (config.run_dir, config.data.source_lang, config.data.target_lang) == (
        "runs/my", "en", "de",
    )  # fmt: skip
    splits = {name: list(read_pairs(*both)) for name, both in result["files"].items()}
    assert [len(splits[name]) for name in ("train", "valid", "test")] == [183, 10, 7]
    assert result["training_pairs"] == 183
    whole = [(pair.source, pair.target) for pair in read_pairs(*corpus)]
    parts = [(pair.source, pair.target) for part in splits.values() for pair in part]
    assert sorted(parts) == sorted(whole)
    assert result["corpus"]["source"]["long"] == max(sorted(len(s) for s, _ in whole)[:198])
    text = Path("my.yaml").read_text(encoding="utf-8")
    assert text.startswith(f"# yaml-language-server: $schema={SCHEMA_FILE}\n")
    assert Path(SCHEMA_FILE).read_text(encoding="utf-8") == schema_text()
    short = ("train.max_steps=3", "train.valid_every=3", "train.average=0", "model.d_model=16")
    options = [word for setting in (*short, "optim.warmup_steps=1") for word in ("--set", setting)]
    assert run("train", "--config", "my.yaml", *options) == 0
    assert read_index(Path("runs/my")).best == "step-00000003"
    assert "BLEU" in capsys.readouterr().out


def test_init_takes_validation_files(
    corpus: tuple[str, str], files: Write, capsys: Capture
) -> None:
    """Stops a copy of the corpus where nothing needs to be cut off."""
    valid = files("v.en", ["a b", "c d"]), files("v.de", ["x y", "z"])
    path = Path(corpus[0]).with_name("a.yaml")
    options = ("--valid-source", valid[0], "--valid-target", valid[1], "--run-dir", "r/x")
    assert run("init", *corpus, *options, "--output", path) == 0
    config = load_config(path)
    assert config.run_dir == "r/x"
    assert (config.data.train[0].source, config.data.train[0].target) == corpus
    assert (config.data.valid.source, config.data.valid.target) == valid
    assert config.data.test is None
    names = {"train.en", "train.de", "v.en", "v.de", "a.yaml", SCHEMA_FILE}
    assert set(os.listdir(path.parent)) == names
    out = capsys.readouterr().out
    assert "200 lines with text" in out and f"written: {path}, and {SCHEMA_FILE}" in out


def test_init_is_repeatable_and_follows_the_seed(
    corpus: tuple[str, str], tmp_path: Path, capsys: Capture
) -> None:
    texts = []
    for number, seed in enumerate(("4", "4", "5")):
        folder = tmp_path / f"f{number}"
        folder.mkdir()
        assert run("init", *corpus, "--seed", seed, "--output", folder / "x.yaml") == 0
        texts.append((folder / "x.valid.en").read_text())
    assert texts[0] == texts[1] != texts[2]


def test_init_reads_packed_text_and_files_of_pairs(files: Write, capsys: Capture) -> None:
    """Stops two readers of parallel text: what `train` reads, `init` reads."""
    lines = random_sentences(60, 2, shortest=5)
    packed = gzip.compress("".join(f"{line}\n" for line in lines).encode())
    source, target = files("c.en-de.en.gz", packed), files("c.en-de.de.txt", lines)
    path = Path(source).with_name("gz.yaml")
    assert run("init", source, target, "--output", path) == 0
    assert (load_config(path).data.source_lang, load_config(path).data.target_lang) == ("en", "de")
    assert len(list(read_lines(path.with_name("gz.train.en.gz")))) == 50
    table = files("c.tsv", [f"{line}\t{line.upper()}" for line in lines])
    path = Path(source).with_name("tsv.yaml")
    langs = ("--source-lang", "en", "--target-lang", "en")
    assert run("init", table, *langs, "--output", path, "--valid", "5") == 0
    config = load_config(path)
    kept = list(read_pairs(str(config.data.train[0].source), str(config.data.train[0].target)))
    assert len(kept) == 55 and all(pair.target == pair.source.upper() for pair in kept)


def test_passes_of_init_are_those_of_a_dry_run(
    files: Write, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stops an estimate that the next command contradicts, here with much of the text cut off."""
    monkeypatch.chdir(tmp_path)
    lines = random_sentences(1500, 5, shortest=5)
    files("a.en", lines), files("a.de", [line[::-1].strip() for line in lines])
    given = ("a.en", "a.de", "--test", "200", "--valid", "200", "--device", "cpu")
    assert run("init", *given, "--output", "a.yaml", "--json") == 0
    epochs = json.loads(capsys.readouterr().out)["epochs"]
    assert run("train", "--config", "a.yaml", "--dry-run", "--json") == 0
    assert json.loads(capsys.readouterr().out)["epochs"] == pytest.approx(epochs, rel=0.08)


@pytest.mark.parametrize(
    ("first", "given", "langs"),
    [
        ({"id": "7", "translation": {"en": "a", "de": "b"}}, (), ("en", "de")),
        ({"de": "b", "en": "a", "score": 1}, (), ("de", "en")),
        ({"en": "a", "de": "b"}, ("--source-lang", "de"), ("de", "en")),
        ({"en": "a", "de": "b"}, ("--target-lang", "de"), ("en", "de")),
    ],
)
def test_init_takes_languages_from_json(
    first: dict[str, Any],
    given: tuple[str, ...],
    langs: tuple[str, str],
    files: Write,
    capsys: Capture,
) -> None:
    """Stops a question whose answer stands in the file."""

    def line(number: int) -> str:
        texts = {"en": f"line {number}", "de": f"zeile {number}"}
        plain = (
            {"translation": texts} if "translation" in first else {k: texts.get(k) for k in first}
        )
        return json.dumps(plain | ({"id": "7"} if "id" in first else {}))

    path = files("all.jsonl", [line(number) for number in range(40)])
    output = Path(path).with_name("x.yaml")
    assert run("init", path, *given, "--output", output) == 0
    data = load_config(output).data
    assert (data.source_lang, data.target_lang) == langs
    told = f"languages: {langs[0]} to {langs[1]} (from the first object of {path})"
    assert told in capsys.readouterr().err
    pair = next(read_pairs(str(data.train[0].source), str(data.train[0].target)))
    assert pair.source.startswith("line" if langs[0] == "en" else "zeile")


def test_init_asks_for_both_languages_at_once(files: Write, capsys: Capture) -> None:
    """Stops two refusals where one says all, and a guess among three languages."""
    several = [json.dumps({"en": "a", "de": "b", "fr": "c"})]
    cases = [
        ("a.jsonl", several, ()),
        ("b.jsonl", ["{no json"], ()),
        ("c.jsonl", ["[1]"], ()),
        ("d.jsonl", [json.dumps({"src": "a", "tgt": "b"})], ()),
        ("e.tsv", ["a\tb"], ()),
    ]
    for name, lines, given in cases:
        error = refused(capsys, "init", files(name, lines), *given)
        assert error.startswith("2 Which language is the source and which the target? "), error
        assert "--source-lang en --target-lang de" in error
    two = files("f.jsonl", [json.dumps({"en": "a", "de": "b"})])
    error = refused(capsys, "init", two, "--source-lang", "fr")
    assert error.startswith("2 Which language is the target? ") and "--target-lang" in error


def test_init_for_a_gpu(corpus: tuple[str, str], tmp_path: Path, capsys: Capture) -> None:
    """Stops a file for a machine that is not the one asked for."""
    for device in ("cuda", "cpu", "auto"):
        path = tmp_path / f"{device}.yaml"
        assert run("init", *corpus, "--device", device, "--output", path) == 0
        assert load_config(path).train.device == device
    text = (tmp_path / "cuda.yaml").read_text(encoding="utf-8")
    assert "estimated" not in text and "on a GPU (cuda)" in text
    assert "# On a GPU" in (tmp_path / "cpu.yaml").read_text(encoding="utf-8")


def test_init_overwrites_nothing(corpus: tuple[str, str], capsys: Capture) -> None:
    """Stops `init` from replacing the file that somebody has worked on, or a text."""
    folder = Path(corpus[0]).parent
    for name in ("mine.yaml", "mine.valid.de"):
        (folder / name).write_text("my work")
        error = refused(capsys, "init", *corpus, "--output", folder / "mine.yaml")
        assert error.startswith(f"2 {folder / name}: exists already")
        run("init", *corpus, "--output", folder / "mine.yaml")
        assert "languages:" not in capsys.readouterr().err  # refused first, then told
        assert (folder / name).read_text() == "my work"
        (folder / name).unlink()
    (folder / SCHEMA_FILE).write_text("{}")
    assert run("init", *corpus, "--output", folder / "mine.yaml") == 0
    assert "is not ours and stays" in capsys.readouterr().err
    assert (folder / SCHEMA_FILE).read_text() == "{}"


def test_init_leaves_nothing_when_it_fails(files: Write, tmp_path: Path, capsys: Capture) -> None:
    """Stops half a set of files beside a corpus that turns out to be damaged."""
    good = [f"line {n}" for n in range(40)]
    bad = files("bad.de", "".join(f"{line}\n" for line in good).encode() + b"\xff\n")
    cases: list[tuple[str, str, str]] = [
        (files("a.en", good), files("b.de", good[:-1]), "3 .*40 lines but .* has 39"),
        (files("c.en", [*good, "x"]), bad, "3 .*bad.de, line 41, byte offset .*not UTF-8"),
        (files("d.en", [""] * 9), files("d.de", [""] * 9), "3 .*0 of the pairs have text"),
        (files("e.en", b""), files("e.de", b""), "3 .*0 of the pairs have text"),
        (files("f.en", ["a"] * 9), files("f.de", ["b"] * 9), "3 No pair is left for training"),
        (files("g.en", ["a"] * 90), files("g.de", ["b"] * 90), "3 Only 1 of the pairs"),
    ]
    before = set(os.listdir(tmp_path))
    for source, target, message in cases:
        error = refused(capsys, "init", source, target, "--output", tmp_path / "x.yaml")
        assert re.search(message, error), error
        assert set(os.listdir(tmp_path)) == before


def test_init_refuses_what_has_no_effect(
    corpus: tuple[str, str], files: Write, tmp_path: Path, capsys: Capture
) -> None:
    """Stops options that are taken and then forgotten."""
    valid = ("--valid-source", corpus[0], "--valid-target", corpus[1])
    plain = files("corpus.txt", ["a"])
    cases: list[tuple[tuple[str, ...], str]] = [
        ((), "2 Name the corpus"),
        ((corpus[0],), f"2 Name the translations of {corpus[0]}"),
        ((corpus[0], corpus[0]), "2 SRC and TGT are the same file"),
        ((corpus[0], str(tmp_path / "none.de")), "3 "),
        ((str(tmp_path), corpus[1]), f"3 {tmp_path} is no plain file"),
        ((plain, corpus[1]), "2 Which language is the source?"),
        ((*corpus, "--target-lang", "german"), "2 german is not a language code; give "),
        ((*corpus, *valid[:2]), "2 --valid-source and --valid-target belong together"),
        ((*corpus, *valid, "--valid", "3"), "2 --valid cuts off"),
        ((*corpus, *valid, "--seed", "3"), "2 --seed has no effect"),
        ((*corpus, "--valid", "0"), "2 --valid is 0"),
        ((*corpus, "--valid", "200"), "2 200 pairs are to be cut off 200"),
        ((*corpus, "--device", "gpu"), "2 --device gpu: write cpu"),
        ((files("p.tsv", ["a\tb"]), corpus[1]), "2 "),
        ((files("q.tsv", ["a\tb"]),), "2 Which language is the source and which the target?"),
        ((*corpus, "--output", str(tmp_path / "x.json")), "2 --output"),
        ((*corpus, "--output", str(tmp_path / "no" / "x.yaml")), "3 "),
    ]
    before = set(os.listdir(tmp_path))
    for args, message in cases:
        more = () if "--output" in args else ("--output", str(tmp_path / "x.yaml"))
        error = refused(capsys, "init", *args, *more)
        assert error.startswith(message), error
    assert set(os.listdir(tmp_path)) == before


def test_init_tells_of_blank_pairs(files: Write, capsys: Capture) -> None:
    lines = random_sentences(40, 2, shortest=5)
    source = files("a.en", [*lines, "", "x"])
    assert run("init", source, files("a.de", [*lines, "y", " "]), "--output", f"{source}.yaml") == 0
    assert "2 pairs are blank" in capsys.readouterr().err


# ---- config -----------------------------------------------------------------------------------


def test_config_prints_what_train_would_take(
    corpus: tuple[str, str], tmp_path: Path, capsys: Capture
) -> None:
    """Stops a printed configuration that is not the resolved one."""
    path = tmp_path / "m.yaml"
    assert run("init", *corpus, "--output", path) == 0
    capsys.readouterr()
    wanted = load_config(path, ["optim.lr=1e-4"]).model_dump(mode="json")
    assert run("config", "--config", path, "--set", "optim.lr=1e-4") == 0
    printed = capsys.readouterr().out
    (tmp_path / "again.yaml").write_text(printed, encoding="utf-8")
    assert load_config(tmp_path / "again.yaml").model_dump(mode="json") == wanted
    assert set(yaml.safe_load(printed)) == set(wanted)
    assert run("config", "--config", path, "--set", "optim.lr=1e-4", "--json") == 0
    assert json.loads(capsys.readouterr().out) == wanted
    assert run("config", "--config", path, "--output", tmp_path / "out.yaml") == 0
    assert load_config(tmp_path / "out.yaml") == load_config(path)


def test_config_prints_the_schema(tmp_path: Path, capsys: Capture) -> None:
    assert run("config", "--schema") == 0
    assert capsys.readouterr().out == schema_text()


def test_config_refuses(corpus: tuple[str, str], tmp_path: Path, capsys: Capture) -> None:
    path = tmp_path / "wrong.yaml"
    path.write_text("run_dir: x\nsed: 1\n")
    good = tmp_path / "good.yaml"
    assert run("init", *corpus, "--output", good) == 0
    capsys.readouterr()
    cases: list[tuple[Any, str]] = [
        ((), "2 Give either --config"),
        (("--schema", "--config", path), "2 Give either --config"),
        (("--schema", "--json"), "2 --json has no effect"),
        (("--schema", "--set", "a.b=1"), "2 --set has no effect"),
        (("--config", good, "--output", good), "2 --output is the configuration"),
        (("--config", tmp_path / "none.yaml"), "2 "),
    ]
    for args, message in cases:
        assert refused(capsys, "config", *args).startswith(message)
    assert run("config", "--config", path) == 2
    assert f"{path}:2: sed: unknown key (did you mean 'seed'?)" in capsys.readouterr().err
