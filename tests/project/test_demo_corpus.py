"""The demo corpus is what its script writes, and its parts keep apart what they promise to."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
DEMO = ROOT / "data" / "demo"
SCRIPT = ROOT / "scripts" / "make_demo_corpus.py"
COUNTS = {"train": 20000, "valid": 500, "test": 500, "test.compositional": 100}

Pair = tuple[str, str]


def read(part: str) -> list[Pair]:
    """The pairs of a part of the corpus."""
    english, german = (
        (DEMO / f"{part}.{side}").read_text(encoding="utf-8").splitlines() for side in ("en", "de")
    )
    return list(zip(english, german, strict=True))


def words(sentence: str) -> list[str]:
    """The words and marks of a sentence, written apart."""
    for mark in ".,!?":
        sentence = sentence.replace(mark, f" {mark} ")
    return sentence.split()


def held_out() -> list[tuple[set[str], set[str]]]:
    """The forms of the verb and of the noun of each held-out pair."""
    rows = (DEMO / "compositional.tsv").read_text(encoding="utf-8").splitlines()[1:]
    columns = (row.split("\t") for row in rows)
    return [(set(verbs.split()), set(nouns.split())) for _, _, verbs, nouns in columns]


def together(sentence: str) -> list[int]:
    """Which held-out pairs have both their words in an English sentence."""
    found = {word.lower() for word in words(sentence)}
    pairs = enumerate(held_out_pairs)
    return [number for number, (verbs, nouns) in pairs if found & verbs and found & nouns]


held_out_pairs = held_out()
CORPUS = {part: read(part) for part in COUNTS}


def test_the_script_writes_the_committed_files() -> None:
    """A set that is iterated would give another corpus under another hash seed."""
    environment = {**os.environ, "PYTHONHASHSEED": "random"}
    command = [sys.executable, str(SCRIPT), "--check"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("part", COUNTS)
def test_counts(part: str) -> None:
    """The README and the tutorials name these sizes."""
    assert len(CORPUS[part]) == COUNTS[part]


def test_no_english_sentence_comes_twice_or_with_two_germans() -> None:
    """The English must determine the German, or the score measures luck."""
    pairs = [pair for part in ("train", "valid", "test") for pair in CORPUS[part]]
    assert len({english for english, _ in pairs}) == len(pairs)


@pytest.mark.parametrize("part", ["valid", "test"])
@pytest.mark.parametrize("side", [0, 1], ids=["en", "de"])
def test_nothing_held_out_is_in_train(part: str, side: int) -> None:
    """Neither direction of translation may be scored on what it was trained on."""
    train = {pair[side] for pair in CORPUS["train"]}
    assert not [pair for pair in CORPUS[part] if pair[side] in train]


@pytest.mark.parametrize("part", ["valid", "test"])
@pytest.mark.parametrize("side", [0, 1], ids=["en", "de"])
def test_train_has_every_word(part: str, side: int) -> None:
    """A word that train never shows cannot be translated."""
    known = {word for pair in CORPUS["train"] for word in words(pair[side])}
    assert not {word for pair in CORPUS[part] for word in words(pair[side])} - known


@pytest.mark.parametrize("part", ["train", "valid"])
def test_held_out_pairs_never_meet(part: str) -> None:
    """In train and valid no sentence has both words of a pair, whatever it does with them."""
    assert not [english for english, _ in CORPUS[part] if together(english)]


def test_the_last_hundred_of_test_join_held_out_pairs() -> None:
    """The compositional part is exactly what joins the pairs, and it can be scored by itself."""
    joining = [pair for pair in CORPUS["test"] if together(pair[0])]
    assert joining == CORPUS["test"][-100:] == CORPUS["test.compositional"]
    for number in range(len(held_out_pairs)):
        assert sum(number in together(english) for english, _ in joining) >= 4


def test_both_words_of_a_held_out_pair_are_common_in_train() -> None:
    """What is new about a compositional sentence is the pair, not its words."""
    train = [set(words(english.lower())) for english, _ in CORPUS["train"]]
    for verbs, nouns in held_out_pairs:
        assert sum(bool(found & verbs) for found in train) >= 40, verbs
        assert sum(bool(found & nouns) for found in train) >= 40, nouns


def test_the_lines_are_plain() -> None:
    """Tools split at white space; a stray space or tab would be a token of its own."""
    for pairs in CORPUS.values():
        for pair in pairs:
            for sentence in pair:
                assert sentence == " ".join(sentence.split())
                assert sentence[0].isupper() and sentence[-1] in ".!?"


def test_germans_contract_preposition_and_article() -> None:
    """in dem, zu der and the like are always written im, zur."""
    loose = {"in dem", "in das", "an dem", "an das", "zu dem", "zu der", "von dem", "bei dem"}
    text = " ".join(german for pairs in CORPUS.values() for _, german in pairs)
    assert not [two for two in loose if f" {two} " in text]


def test_i_love_you_is_in_train() -> None:
    """The sentence that everybody tries first."""
    assert ("I love you.", "Ich liebe dich.") in CORPUS["train"]
