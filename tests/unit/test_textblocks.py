"""Undecoded blocks against the reader of single pairs: what they give, and what they refuse."""

from __future__ import annotations

import gzip
from collections.abc import Callable, Iterator

import pytest

from mttrain import textblocks
from mttrain.corpus import read_pairs
from mttrain.errors import DataError
from mttrain.pairs import ParallelText
from mttrain.textblocks import decoded, text_blocks

LANGS = ("en", "de")
Triple = tuple[int, str, str]


def in_blocks(text: ParallelText) -> Iterator[Triple]:
    for block in text_blocks(text):
        yield from zip(block.lines.tolist(), *decoded(block), strict=True)


def one_by_one(text: ParallelText) -> Iterator[Triple]:
    pairs = read_pairs(*text.files) if len(text.files) == 2 else text.pairs()
    return ((pair.line, pair.source, pair.target) for pair in pairs)


def outcome(triples: Iterator[Triple]) -> tuple[list[Triple], str]:
    """Everything up to an error, and the error."""
    found: list[Triple] = []
    try:
        found.extend(triples)
    except DataError as error:
        return found, str(error)
    return found, ""


NASTY = {
    "plain": (b"a\nb\n", b"A\nB\n"),
    "windows": (b"a\r\nb\r\n", b"A\nB"),
    "carriage returns": (b"a\r\r\nb\rc\n\r\n\r", b"A\nB\nC\nD\r"),
    "marks": (b"\xef\xbb\xbfa\n\xef\xbb\xbfb\n", b"\xef\xbb\xbfA\r\n\xef\xbb\xbf\n"),
    "separators": ("a\u2028b\x85\x0bc\x0c\n\x1cd\n".encode(), b"A\x00\n\x1d\n"),
    "blank": (b"\n\n \n", b"\n\t\n\n"),
    "empty": (b"", b""),
    "packed": (gzip.compress(b"a\n") + gzip.compress(b"b\n"), b"A\nB\n"),
}


@pytest.mark.parametrize("name", NASTY)
@pytest.mark.parametrize("size", [1, 2, 4096])
def test_blocks_hold_the_pairs(
    name: str, size: int, files: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """T01 to T11, T18: a second reader that cuts lines in its own way puts files out of step."""
    monkeypatch.setattr(textblocks, "PAIRS", size)
    monkeypatch.setattr(textblocks, "_STEP", size)
    source, target = NASTY[name]
    text = ParallelText((files("a.en", source), files("a.de", target)), LANGS)
    assert outcome(in_blocks(text)) == outcome(one_by_one(text))
    assert not outcome(one_by_one(text))[1]


FAULTS = {
    "short source": (b"a\nb\n", b"A\nB\nC\nD\n"),
    "short target": (b"a\nb\nc", b"A\nB\n"),
    "no source": (b"", b"A\n"),
    "latin-1": (b"a\nb\xe9c\n", b"A\nB\n"),
    "latin-1 behind a mark": (b"\xef\xbb\xbfa\n\xffb\n", b"A\nB\n"),
    "both sides": (b"a\nb\nc\xe9\n", b"A\nB\xe9\nC\n"),
    "both sides, one line": (b"a\nb\xe9\n", b"A\nB\xe9\n"),
    "cut character": (b"a\nb\n", b"A\nB\xe2\x82"),
    "utf-16": ("ab\n".encode("utf-16"), b"A\n"),
    "cut gzip": (gzip.compress(b"a\nb\n" * 9)[:-9], b"A\n" * 18),
}


@pytest.mark.parametrize("name", FAULTS)
@pytest.mark.parametrize("size", [1, 2, 4096])
def test_faults_are_told_in_the_same_words(
    name: str, size: int, files: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """T07, T10: file, line and byte offset of the first fault, wherever a block ends."""
    monkeypatch.setattr(textblocks, "PAIRS", size)
    monkeypatch.setattr(textblocks, "_STEP", size)
    source, target = FAULTS[name]
    text = ParallelText((files("a.en", source), files("a.de", target)), LANGS)
    wanted = outcome(one_by_one(text))[1]
    assert wanted and outcome(in_blocks(text))[1] == wanted


def test_missing_file_is_an_error(files: Callable[..., str]) -> None:
    text = ParallelText((files("a.en", ["a"]), "no.de"), LANGS)
    with pytest.raises(DataError, match=r"no\.de: cannot read"):
        list(text_blocks(text))


def test_other_forms(files: Callable[..., str]) -> None:
    """A mark in front of a later text is text, and JSON lines keep their own numbers."""
    lines = ['{"en": "a", "de": "\\ufeffA"}', "", '{"en": "", "de": "B"}', '{"en": "c", "de": ""}']
    text = ParallelText((files("a.jsonl", lines),), LANGS)
    assert list(in_blocks(text)) == [(1, "a", "\ufeffA"), (3, "", "B"), (4, "c", "")]
    text = ParallelText((files("a.tsv", ["\t", "a\tA"]),), LANGS)
    assert list(in_blocks(text)) == list(one_by_one(text))


def test_long_lines_make_small_blocks(files: Callable[..., str]) -> None:
    """T14: thousands of lines of a megabyte each are no block of pairs, they are all memory."""
    line = "x" * 200_000
    text = ParallelText((files("a.en", [line] * 100), files("a.de", ["y"] * 100)), LANGS)
    blocks = list(text_blocks(text))
    assert max(len(block.texts[0]) for block in blocks) < 6_000_000
    assert [line for block in blocks for line in block.lines.tolist()] == list(range(1, 101))
