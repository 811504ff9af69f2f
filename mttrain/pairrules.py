"""Which pairs of a corpus are used, told for a block of them in arrays.

What a report counts is what training leaves out, since both ask here. Repeated pairs are told by
64-bit hashes of their text: among ten million pairs two different ones are taken for equal with a
probability of 3 in a million. The hashes lie in one flat table, 11 to 22 bytes a pair.

Shapes: N pairs of a block.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any

import numpy as np
from numpy.typing import NDArray

REASONS = ("blank", "too_long", "ratio", "duplicate")
"""Why a pair is skipped; of several the first."""

USED = 0
BLANK, TOO_LONG, RATIO, DUPLICATE = range(1, 1 + len(REASONS))  # codes of the reasons
_FULL = 0.7  # share of the table beyond which it doubles; probes stay few


@dataclass(slots=True)
class PairRules:
    """Which pairs are used. One object serves one pass over a corpus: it remembers the pairs seen.

    Lengths are subwords with EOS, without a tag, which takes one of `max_length`. `max_ratio`
    bounds longer/shorter without EOS; None is no bound.
    """

    max_length: int
    max_ratio: float | None = None
    drop_duplicates: bool = False
    _seen: HashSet | None = field(default=None, repr=False)

    def codes(
        self,
        source_lens: NDArray[np.int64],
        target_lens: NDArray[np.int64],
        blank: NDArray[np.bool_],
        tagged: bool,
    ) -> NDArray[np.int8]:
        """[N] int8: `USED` or the code of the first reason that applies, but for duplicates.

        blank: those of `blank_pairs`, whose lengths are not looked at; text without subwords is
        blank, too. The same pair with another tag is another pair.
        """
        codes = np.full(len(blank), USED, dtype=np.int8)
        if self.max_ratio is not None:
            shorter = np.minimum(source_lens, target_lens) - 1
            longer = np.maximum(source_lens, target_lens) - 1
            codes[longer > self.max_ratio * shorter] = RATIO
        longest = np.maximum(source_lens + tagged, target_lens)
        codes[longest > self.max_length] = TOO_LONG
        empty = blank | (source_lens <= 1) | (target_lens <= 1)
        codes[empty] = BLANK
        return codes

    def new(self, hashes: NDArray[np.uint64]) -> NDArray[np.bool_]:
        """[N] which of these pairs were not seen before, in earlier calls or in this one."""
        if self._seen is None:
            self._seen = HashSet()
        return self._seen.add(hashes)


class HashSet:
    """64-bit numbers in one flat table with linear probing (Knuth, vol. 3, 6.4, algorithm L)."""

    def __init__(self) -> None:
        self._table = np.zeros(1 << 14, dtype=np.uint64)  # 0: a free place
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def add(self, numbers: NDArray[np.uint64]) -> NDArray[np.bool_]:
        """Put them in; [N] True for each that was not there, of equal ones for the first."""
        # 0 is taken for 1.
        found, first = np.unique(np.maximum(numbers, np.uint64(1)), return_index=True)
        if len(self) + len(found) > _FULL * len(self._table):
            self._grow(len(self) + len(found))
        inserted = self._insert(found)
        self._count += int(inserted.sum())
        new = np.zeros(len(numbers), dtype=np.bool_)
        new[first[inserted]] = True
        return new

    def _insert(self, numbers: NDArray[np.uint64]) -> NDArray[np.bool_]:
        """Different numbers: which ones found a free place."""
        inserted = np.zeros(len(numbers), dtype=np.bool_)
        mask = np.uint64(len(self._table) - 1)
        going = np.arange(len(numbers))
        at = numbers & mask
        while len(going):
            wanted = numbers[going]
            there = self._table[at]
            free = there == 0
            self._table[at[free]] = wanted[free]  # of several for one place the last stays
            mine = free & (self._table[at] == wanted)
            inserted[going[mine]] = True
            left = ~(mine | (there == wanted))
            going, at = going[left], (at[left] + np.uint64(1)) & mask
        return inserted

    def _grow(self, count: int) -> None:
        old, size = self._table[self._table != 0], len(self._table)
        while count > _FULL * size / 2:
            size *= 2
        self._table = np.zeros(size, dtype=np.uint64)
        for first in range(0, len(old), 1 << 20):
            self._insert(old[first : first + (1 << 20)])


def blank_pairs(sources: Sequence[str], targets: Sequence[str]) -> NDArray[np.bool_]:
    """[N] where the text of a side holds nothing but white space."""
    pairs = zip(sources, targets, strict=True)
    return np.array(
        [not (one and two) or one.isspace() or two.isspace() for one, two in pairs], dtype=np.bool_
    )


def pair_hash(source: str, target: str, tag: str | None) -> int:
    """64 bits that stand for the text of a pair with its tag."""
    text = f"{source}\n{target}" if tag is None else f"{source}\n{target}\n{tag}"
    return int.from_bytes(blake2b(text.encode("utf-8"), digest_size=8).digest(), "little")


def as_settings(rules: PairRules) -> dict[str, Any]:
    """The rules in plain values: `PairRules(**as_settings(rules))` is a fresh object of them."""
    return {
        "max_length": rules.max_length,
        "max_ratio": rules.max_ratio,
        "drop_duplicates": rules.drop_duplicates,
    }
