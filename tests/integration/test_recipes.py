"""What a model made becomes training text: back-translation and distillation as docs/recipes.md has
them, from the reverse model to the run that trains on its output."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from mttrain.checkpoint import load_model, read_meta, resolve_model
from mttrain.cli import main
from mttrain.config import load_config
from mttrain.corpus import read_lines, write_lines
from mttrain.dataset import TranslationDataset, encode_corpus
from mttrain.tokenizer import EOS_ID, Tokenizer
from mttrain.trainer import train
from tests.integration.training_help import random_sentences, tiny_config, write_pairs
from tests.project.docs_sandbox import PROJECT, blocks, saved_as

PAGE = PROJECT / "docs" / "recipes.md"
WORDS = 8
LONG = " ".join(["BA"] * 40)  # of no length that the reverse model has seen
MONO = [*(x.upper() for x in random_sentences(30, seed=4, longest=3, words=WORDS)), "", LONG]
SETTINGS = {"batch_tokens": 300, "max_steps": 120, "valid_every": 60, "log_every": 60}


def filter_of_the_page() -> str:
    """The one block of the page that keeps the lines without a flag."""
    (found,) = (b for b in blocks(PAGE) if '"flags"' in b.body)
    assert found.not_run is not None, "it runs with the page now: this test need not run it"
    return found.body


def made_corpus(name: str, path: Path) -> dict[str, Any]:
    """The corpus that a model has made, as this configuration of the page gives it; at `path`."""
    (found,) = (b for b in blocks(PAGE) if saved_as(b) == name)
    train = yaml.safe_load(found.body)["data"]["train"]
    (made,) = (x for x in (train if isinstance(train, list) else [train]) if "pairs" in x)
    return {**made, "pairs": str(path)}


def corpus(folder: Path, name: str, seed: int, turned: bool = False) -> dict[str, str]:
    """Lower-case lines and the same in capitals; `turned`: the other way."""
    lines = random_sentences(60, seed=seed, longest=3, words=WORDS)
    pairs = [(line, line.upper()) for line in lines]
    return write_pairs(folder, name, [pair[::-1] for pair in pairs] if turned else pairs)


@pytest.fixture(scope="module")
def translated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with a reverse model in `run`, the text `mono`, and `bt.jsonl`, drawn from it."""
    folder = tmp_path_factory.mktemp("reverse")
    text = {
        "source_lang": "yy",
        "target_lang": "xx",
        "train": corpus(folder, "train", 1, turned=True),
        "valid": corpus(folder, "valid", 2, turned=True),
    }
    reverse = train(tiny_config(folder, text, train=SETTINGS, model={"dropout": 0.0})).run_dir
    write_lines(folder / "mono", MONO)
    command = ["translate", "--model", str(reverse), "--input", str(folder / "mono")]
    command += ["--sample", "--top-k", "10", "--max-length", "16", "--format", "jsonl"]
    assert main([*command, "--output", str(folder / "bt.jsonl")]) == 0
    return folder


def objects(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in read_lines(path)]


def seen(run: Path, folder: Path) -> list[tuple[str | None, str, str]]:
    """Tag, source and target of each training pair, from the ids that training gets."""
    model = load_model(run)
    source, target = model.source_tokenizer, model.target_tokenizer
    data = load_config(run / "config.yaml").data
    dataset = TranslationDataset(encode_corpus(data, (source, target), "train", folder / "store"))
    return [
        (*parted(list(dataset[n].source), source), target.decode(list(dataset[n].target)[:-1]))
        for n in range(len(dataset))
    ]


def parted(ids: list[int], tokenizer: Tokenizer) -> tuple[str | None, str]:
    """The tag before a source, if there is one, and its text."""
    names = {number: name for name, number in tokenizer.tags.items()}
    assert ids[-1] == EOS_ID and not names.keys() & set(ids[1:])
    tag = names.get(ids[0])
    return tag, tokenizer.decode(ids[1:-1] if tag else ids[:-1])


def test_back_translation(translated: Path, tmp_path: Path) -> None:
    """Pairs that are turned the wrong way round, that lose step with the monolingual text, or whose
    tag stands before real text, would train without a word and make the model worse."""
    drawn = objects(translated / "bt.jsonl")
    assert [line["source"] for line in drawn] == MONO
    assert drawn[-2]["flags"] == ["blank"] and "hit_limit" in drawn[-1]["flags"]
    (tmp_path / "bt.jsonl").write_bytes((translated / "bt.jsonl").read_bytes())
    subprocess.run(["bash", "-ec", filter_of_the_page()], cwd=tmp_path, check=True)
    kept = objects(tmp_path / "bt.jsonl")
    assert kept == [line for line in drawn if not line["flags"]]
    assert len(kept) >= 10 and len({line["text"] for line in kept}) > 3

    real = corpus(tmp_path, "train", 1)
    synthetic = made_corpus("with_bt.yaml", tmp_path / "bt.jsonl")
    text = {"train": [{**real, "weight": 2}, synthetic], "valid": corpus(tmp_path, "valid", 2)}
    run = train(tiny_config(tmp_path, text, train={"max_steps": 4, "valid_every": 2})).run_dir
    pairs = seen(run, tmp_path)
    lines = [list(read_lines(real[side])) for side in ("source", "target")]
    assert pairs[:60] == [(None, *pair) for pair in zip(*lines, strict=True)]
    assert pairs[60:] == [("bt", line["text"], line["source"]) for line in kept]
    meta = read_meta(resolve_model(run))
    assert meta["tags"] == {"bt": "yy"} and meta["untagged"] is True
    # Real text is translated without a tag, which is what the recipe says.
    command = ["translate", "--model", str(run), "--input", real["source"]]
    assert main([*command, "--output", str(tmp_path / "out")]) == 0
    assert len(list(read_lines(tmp_path / "out"))) == 60


def test_distillation(translated: Path, tmp_path: Path) -> None:
    """The student learns the teacher's output, not the reference, and for the same source. The
    reverse model is the teacher here, so capitals are the source."""
    source, output = translated / "train.src", tmp_path / "distilled.jsonl"
    command = ["translate", "--model", str(translated / "run"), "--input", str(source)]
    assert main([*command, "--format", "jsonl", "--output", str(output)]) == 0
    text = {
        "source_lang": "yy",
        "target_lang": "xx",
        "train": made_corpus("student.yaml", output),
        "valid": corpus(tmp_path, "valid", 2, turned=True),
    }
    run = train(tiny_config(tmp_path, text, train={"max_steps": 4, "valid_every": 2})).run_dir
    made = [line for line in objects(output) if line["text"].strip()]
    assert [line["source"] for line in objects(output)] == list(read_lines(source))
    assert seen(run, tmp_path) == [(None, line["source"], line["text"]) for line in made]
