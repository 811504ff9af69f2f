"""Parallel text in blocks of undecoded lines: what is handed to a process that encodes them.

Whoever reads a corpus for many encoders must do little for each pair. Here two files of lines are
cut into blocks without looking into the lines, at some millions of pairs a second; decoding, and
complaints about bytes that are not UTF-8, are the encoders' affair (`decoded`). Other forms of text
(tables, JSON lines, TMX) are read as pairs and packed the same way, at the speed of their readers.

A block ends at so many pairs or at so many bytes, whichever comes first: the memory that a block
takes does not grow with the length of the lines. Where blocks begin is a function of the files
alone, so that reading can start again at a block.
"""

from __future__ import annotations

import codecs
import itertools
from collections.abc import Generator, Iterator
from contextlib import ExitStack, closing
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from mttrain.corpus import in_blocks, line_body, not_utf8, path_name, reading
from mttrain.errors import DataError, unequal_lines

if TYPE_CHECKING:  # an encoder needs nothing of how pairs are read
    from mttrain.pairs import ParallelText

PAIRS = 4096  # of a block
_BYTES = 512 << 10  # of a side of a block, or some lines more: 100 MB at most in an encoder
_STEP = 16  # lines read between two looks at the bytes


@dataclass(frozen=True, slots=True)
class TextBlock:
    """N consecutive pairs: undecoded lines, each with its line feed (but maybe the last).

    lines [N] int64: their line numbers, from 1. offsets: where the block begins in the unpacked
    text of each side, in bytes; at 0 a byte order mark is dropped.
    """

    files: tuple[str, str]
    lines: NDArray[np.int64]
    texts: tuple[bytes, bytes]
    offsets: tuple[int, int]


def text_blocks(text: ParallelText) -> Iterator[TextBlock]:
    """All pairs of a corpus (of one shard, where it has several).

    DataError: files missing, damaged, out of step. The pairs before the fault come first.
    """
    assert not text.more, "shards are read one by one"
    if len(text.files) == 2:
        yield from _line_blocks(*text.files)
        return
    (name,) = text.files
    for block in in_blocks(text.pairs(), PAIRS):
        yield TextBlock(
            (name, name),
            np.array([pair.line for pair in block], dtype=np.int64),
            (_packed(pair.source for pair in block), _packed(pair.target for pair in block)),
            (1, 1),
        )


def _packed(lines: Iterator[str]) -> bytes:
    return "".join(f"{line}\n" for line in lines).encode("utf-8")


class _Side:
    """The undecoded lines of one file and how far it was read."""

    def __init__(self, path: str, stack: ExitStack) -> None:
        self.name = path_name(path)
        self.lines, self.bytes = 0, 0  # of the blocks handed out
        self.ahead: list[bytes] = []
        self._stream = stack.enter_context(closing(self._raw(path)))

    def _raw(self, path: str) -> Generator[bytes, None, None]:
        # A generator: what goes wrong with this file must not be told of the other one.
        with reading(path, lambda: f"line {self.lines + len(self.ahead)}") as stream:
            yield from stream

    def read(self, count: int) -> int:
        """Read lines ahead up to `count` in all; returns their bytes."""
        # What an exception interrupts stays in the list: the message counts it.
        self.ahead.extend(itertools.islice(self._stream, count - len(self.ahead)))
        return sum(map(len, self.ahead[-_STEP:]))

    def take(self, count: int) -> bytes:
        """The next lines."""
        text = b"".join(self.ahead[:count])
        del self.ahead[:count]
        self.lines += count
        self.bytes += len(text)
        return text

    def total(self) -> int:
        """All lines of the file; nothing can be read afterwards."""
        return self.lines + len(self.ahead) + sum(1 for _ in self._stream)


def _line_blocks(source: str, target: str) -> Iterator[TextBlock]:
    if path_name(source) == path_name(target) == "standard input":
        raise DataError("Source and target cannot both be standard input; name a file for one.")
    with ExitStack() as stack:
        sides = [_Side(path, stack) for path in (source, target)]
        while True:
            _fill(sides)
            count = min(len(side.ahead) for side in sides)
            if count:
                first, offsets = sides[0].lines, (sides[0].bytes, sides[1].bytes)
                texts = sides[0].take(count), sides[1].take(count)
                lines = np.arange(first + 1, first + count + 1)
                yield TextBlock((source, target), lines, texts, offsets)
            left, right = sides
            if left.ahead or right.ahead:
                raise unequal_lines(left.name, left.total(), right.name, right.total())
            if not count:
                return


def _fill(sides: list[_Side]) -> None:
    """Read a block ahead: as many lines on both sides, unless one ends."""
    count, sizes = 0, [0, 0]
    while count < PAIRS and max(sizes) < _BYTES:
        count += _STEP
        for place, side in enumerate(sides):
            sizes[place] += side.read(count)
        if min(len(side.ahead) for side in sides) < count:
            return


# ---- in the encoder ---------------------------------------------------------------------------


def decoded(block: TextBlock) -> tuple[list[str], list[str]]:
    """The lines of both sides, as `read_lines` gives them; DataError when they are not UTF-8."""
    try:
        source, target = map(_lines, block.texts, block.offsets)
    except UnicodeDecodeError:
        raise DataError(_first_fault(block)) from None
    assert len(source) == len(target) == len(block.lines), "a block is out of step"
    return source, target


def _lines(text: bytes, offset: int) -> list[str]:
    if offset == 0:
        text = text.removeprefix(codecs.BOM_UTF8)
    lines = text.decode("utf-8").removesuffix("\n").split("\n")
    return [line.removesuffix("\r") for line in lines] if b"\r" in text else lines


def _first_fault(block: TextBlock) -> str:
    """The message about the first line that is not UTF-8; of a pair the source comes first."""
    offsets = list(block.offsets)
    sides = [_raw(text) for text in block.texts]
    for number, *pair in zip(block.lines.tolist(), *sides, strict=True):
        for place, raw in enumerate(pair):
            try:
                line_body(raw, first=offsets[place] == 0).decode("utf-8")
            except UnicodeDecodeError:
                name = path_name(block.files[place])
                return not_utf8(name, number, offsets[place], raw)
            offsets[place] += len(raw)
    raise AssertionError("the block is UTF-8 after all")


def _raw(text: bytes) -> list[bytes]:
    """The undecoded lines with their line feeds; bytes.splitlines would split at others too."""
    return [line + b"\n" for line in text.removesuffix(b"\n").split(b"\n")]
