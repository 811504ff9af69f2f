"""The corpus of another domain that scripts/make_demo_corpus.py makes beside the demo corpus."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.project.test_demo_corpus import CORPUS, Pair, words

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "make_demo_corpus.py"
COUNTS = {"train": 2000, "valid": 200, "test": 300}
# Words that have another German here: how it begins, and how that of the demo corpus does.
SENSES = {
    "table": ("tabelle", "tisch"),
    "key": ("taste", "schlüssel"),
    "letter": ("buchstabe", "brief"),
    "opened": ("geöffnet", "aufgemacht"),
    "closed": ("geschlossen", "zugemacht"),
    "ran": ("ausgeführt", "gelaufen"),
    "showed": ("angezeigt", "gezeigt"),
}


def write(folder: Path, *options: str) -> dict[str, bytes]:
    """What the script writes; its bytes, by the name of the file."""
    command = [sys.executable, str(SCRIPT), "--domain", "software", "--output", str(folder)]
    environment = {**os.environ, "PYTHONHASHSEED": "random"}
    subprocess.run([*command, *options], env=environment, check=True, timeout=300)
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    return write(tmp_path_factory.mktemp("software"))


@pytest.fixture(scope="module")
def parts(files: dict[str, bytes]) -> dict[str, list[Pair]]:
    """The pairs of each part."""
    sides = {name: data.decode().splitlines() for name, data in files.items()}
    return {
        part: list(zip(sides[f"{part}.en"], sides[f"{part}.de"], strict=True)) for part in COUNTS
    }


def test_the_same_seed_gives_the_same_bytes(files: dict[str, bytes], tmp_path: Path) -> None:
    """A set that is iterated would give another corpus under another hash seed."""
    assert sorted(files) == sorted(f"{part}.{side}" for part in COUNTS for side in ("de", "en"))
    assert write(tmp_path / "again") == files
    assert write(tmp_path / "other", "--seed", "2")["train.en"] != files["train.en"]


def test_held_out_text_is_new_but_has_known_words(parts: dict[str, list[Pair]]) -> None:
    """A score on sentences of train measures memory, one on words that train lacks nothing."""
    assert {part: len(pairs) for part, pairs in parts.items()} == COUNTS
    pairs = [pair for part in parts.values() for pair in part]
    assert len({english for english, _ in pairs}) == len(pairs)
    for side in (0, 1):
        train = {pair[side] for pair in parts["train"]}
        known = {word for text in train for word in words(text)}
        for pair in parts["valid"] + parts["test"]:
            assert pair[side] not in train and set(words(pair[side])) <= known


def test_the_domain_is_one(parts: dict[str, list[Pair]]) -> None:
    """Text that the demo corpus teaches as well would need no adapting; and a sentence that both
    have with two translations could be learned by nobody who learns both."""
    demo = [pair for part in ("train", "valid", "test") for pair in CORPUS[part]]
    sentences = {english for english, _ in demo}
    known = {word for _, german in CORPUS["train"] for word in words(german)}
    for english, german in (pair for part in parts.values() for pair in part):
        assert english not in sentences
        assert set(words(german)) - known, german


@pytest.mark.parametrize("word", SENSES)
def test_known_words_have_another_german(word: str, parts: dict[str, list[Pair]]) -> None:
    """What fine-tuning must change, and mixing must keep apart, is in both corpora."""
    for pairs, right, wrong in (
        (parts["train"], *SENSES[word]),
        (CORPUS["train"], *reversed(SENSES[word])),
    ):
        germans = [f" {german.lower()}" for english, german in pairs if word in words(english)]
        assert len(germans) >= 3
        assert sum(f" {right}" in german for german in germans) >= 0.9 * len(germans)
        assert not any(f" {wrong}" in german for german in germans)
