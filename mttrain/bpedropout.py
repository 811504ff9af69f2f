"""BPE-dropout: another random segmentation of every word in every epoch.

At each step of the segmentation of a word every possible merge is left out with probability p, and
of the others the one that was learned first is applied wherever it was not left out; when all are
left out, the word is done (Provilkov et al. 2020, algorithm 1). Random numbers are hashes of (seed,
epoch, word, variant, step, place), so the segmentation of a pair is a pure function of seed, epoch
and pair, and nothing has to be stored for resuming.

Many words are segmented together, a step of all at a time, in arrays. A word gets at most
`VARIANTS` segmentations an epoch, from which each occurrence takes one by its own hash: what an
occurrence sees has the same distribution, and a large corpus costs little more than its vocabulary.

Shapes: W words, P places (tokens of all words that are not done yet).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mttrain.hashing import Keys, absorb, as_keys
from mttrain.tokenizer import EOS_ID, Tokenizer

VARIANTS = 32
_BLOCK = 1 << 15  # words segmented together: their arrays fit the cache
_PIECE = 1 << 20  # offsets looked at together
_NONE = int(np.iinfo(np.int32).max)  # rank of a pair that is no merge, or was left out

Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class Ragged:
    """Rows of different lengths: row i is values[starts[i]:starts[i + 1]]."""

    values: NDArray[np.integer]
    starts: Ints

    def __len__(self) -> int:
        return len(self.starts) - 1

    @property
    def lengths(self) -> Ints:
        return np.diff(self.starts)

    def rows(self, first: int, last: int) -> Ragged:
        """Rows first .. last-1."""
        starts = self.starts[first : last + 1]
        return Ragged(self.values[starts[0] : starts[-1]], starts - starts[0])

    def take(self, rows: Ints) -> Ragged:
        """These rows, in this order."""
        begin = self.starts[rows]
        lengths = self.starts[rows + 1] - begin
        starts = _starts(lengths)
        places = np.arange(starts[-1]) + np.repeat(begin - starts[:-1], lengths)
        return Ragged(self.values[places], starts)


def ragged(rows: Sequence[Sequence[int]]) -> Ragged:
    """A table of Python rows."""
    lengths = np.fromiter(map(len, rows), dtype=np.int64, count=len(rows))
    values = np.fromiter((value for row in rows for value in row), dtype=np.int32)
    return Ragged(values, _starts(lengths))


def _starts(lengths: Ints) -> Ints:
    starts = np.zeros(len(lengths) + 1, dtype=np.int64)
    np.cumsum(lengths, out=starts[1:])
    return starts


def _joined(parts: Sequence[Ragged]) -> Ragged:
    """The rows of all parts, one after the other."""
    values = [part.values for part in parts] or [np.zeros(0, dtype=np.int32)]
    lengths = [part.lengths for part in parts] or [np.zeros(0, dtype=np.int64)]
    return Ragged(np.concatenate(values), _starts(np.concatenate(lengths)))


class MergeTable:
    """The merges of a vocabulary: pair of ids -> rank (0 was learned first) and the merged id."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        merges = np.array(tokenizer.merge_ids(), dtype=np.int64).reshape(-1, 3)
        self._vocab = tokenizer.size
        keys = merges[:, 0] * self._vocab + merges[:, 1]
        order = np.argsort(keys)
        self._keys = np.append(keys[order], -1)  # something to look at, if there is no merge
        self._ranks = np.append(order, _NONE).astype(np.int32)
        self.merged = merges[:, 2].astype(np.int32)

    def ranks(self, ids: NDArray[np.integer]) -> NDArray[np.int32]:
        """[P] ids -> [P] the rank of each with its right neighbour; `_NONE` for no merge."""
        ranks = np.full(len(ids), _NONE, dtype=np.int32)
        wanted = ids[:-1].astype(np.int64) * self._vocab + ids[1:]
        at = np.searchsorted(self._keys[:-1], wanted)
        found = self._keys[at] == wanted
        ranks[:-1][found] = self._ranks[at[found]]
        return ranks


def segment(table: MergeTable, words: Ragged, keys: Keys, dropout: float) -> Ragged:
    """Merge W words, given as ids of single bytes, each with its own key [W] of random draws.

    dropout 0 gives the segmentation of the vocabulary's own program, 1 the bytes.
    """
    blocks = range(0, len(words), _BLOCK)
    ends = [min(first + _BLOCK, len(words)) for first in blocks]
    return _joined(
        [
            _segment(table, words.rows(first, end), keys[first:end], dropout)
            for first, end in zip(blocks, ends, strict=True)
        ]
    )


def _segment(table: MergeTable, words: Ragged, keys: Keys, dropout: float) -> Ragged:
    done: list[Ragged] = []
    numbers: list[Ints] = []
    going, number, step = words, np.arange(len(words)), 0
    while len(number):
        going, ended = _step(table, going, absorb(keys[number], as_keys([step])), dropout)
        if ended.any():
            done.append(going.take(np.flatnonzero(ended)))
            numbers.append(number[ended])
            going, number = going.take(np.flatnonzero(~ended)), number[~ended]
        step += 1
    return _joined(done).take(np.argsort(np.concatenate(numbers)))


def _step(table: MergeTable, words: Ragged, keys: Keys, dropout: float) -> tuple[Ragged, Ints]:
    """One merge in each word, by its key [W] of this step; and which words [W] had none left."""
    ids, starts, lengths = words.values, words.starts, words.lengths
    ranks = table.ranks(ids)
    ranks[starts[1:] - 1] = _NONE  # the last token of a word has no right neighbour
    if dropout > 0:
        possible = np.flatnonzero(ranks != _NONE)
        word = np.repeat(np.arange(len(words)), lengths)[possible]
        place = (possible - starts[word]).astype(np.uint64)
        drawn = absorb(keys[word], place) >> np.uint64(11)  # 53 bits, as a float has
        ranks[possible[drawn < np.uint64(dropout * 2.0**53)]] = _NONE
    best = np.minimum.reduceat(ranks, starts[:-1])
    ended = best == _NONE
    chosen = (ranks == np.repeat(best, lengths)) & (ranks != _NONE)
    chosen = _every_other(chosen)
    at = np.flatnonzero(chosen)
    merged = ids.copy()
    merged[at] = table.merged[ranks[at]]
    gone = np.zeros(len(ids) + 1, dtype=np.int64)
    gone[at + 2] = 1  # the right neighbour; counted from the place behind it on
    return Ragged(np.delete(merged, at + 1), starts - np.cumsum(gone)[starts]), ended


def _every_other(chosen: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Of places in a row, which overlap ("aaa" and the merge of two a), the first, third, ..."""
    place = np.arange(len(chosen))
    begins = chosen.copy()
    begins[1:] &= ~chosen[:-1]
    first = np.maximum.accumulate(np.where(begins, place, 0))
    kept: NDArray[np.bool_] = chosen & ((place - first) % 2 == 0)
    return kept


def block_words(
    rows: Sequence[Sequence[int]], places: Sequence[Sequence[int]]
) -> dict[str, NDArray[Any]]:
    """The words of some texts: ids, and of each id the number of its word in its text.

    types, type_lengths  the different words one after the other, by their plain segmentation
    words, word_counts   which of them stands at each place, and how many words each text has
    """
    ids, inside = ragged(rows), ragged(places)
    if not len(ids.values):
        none = np.zeros(0, dtype=np.int64)
        counts = np.zeros(len(rows), dtype=np.int64)
        return {"types": none, "type_lengths": none, "words": none, "word_counts": counts}
    begins = np.diff(inside.values, prepend=-1) != 0
    begins[ids.starts[:-1][ids.lengths > 0]] = True
    counts = np.zeros(len(ids.values) + 1, dtype=np.int64)
    np.cumsum(begins, out=counts[1:])
    words = Ragged(ids.values, np.append(np.flatnonzero(begins), len(ids.values)))
    _, examples, which = np.unique(_hashes(words), return_index=True, return_inverse=True)
    types = words.take(examples)
    return {
        "types": types.values,
        "type_lengths": types.lengths,
        "words": which,
        "word_counts": np.diff(counts[ids.starts]),
    }


class WordCounter:
    """Numbers the different words of a text as it is encoded, by their plain segmentation."""

    def __init__(self) -> None:
        self._numbers: dict[bytes, int] = {}

    def number(self, types: Ragged) -> tuple[Ints, NDArray[np.bool_]]:
        """The numbers of different words, and which of them are met for the first time."""
        known, data = len(self._numbers), types.values.astype(np.uint32).tobytes()
        ends = (types.starts * 4).tolist()
        numbers = [
            self._numbers.setdefault(data[begin:end], len(self._numbers))
            for begin, end in pairwise(ends)
        ]
        found = np.array(numbers, dtype=np.int64)
        return found, found >= known


def _hashes(words: Ragged) -> Keys:
    """A 64-bit number for each word: equal ones for equal words, and hardly for others."""
    lengths = words.lengths
    place = np.arange(len(words.values)) - np.repeat(words.starts[:-1], lengths)
    mixed = absorb(words.values.astype(np.uint64), place.astype(np.uint64))
    return absorb(np.add.reduceat(mixed, words.starts[:-1]), lengths.astype(np.uint64))


class WordSampler:
    """The words of one side of a corpus, and their segmentations in each epoch.

    types: the plain segmentation of the different words; `words`: of each pair the numbers of its
    words among them.
    """

    def __init__(
        self, tokenizer: Tokenizer, types: Ragged, words: Ragged, dropout: float, seed: int
    ) -> None:
        self._table, self._words = MergeTable(tokenizer), words
        parts = ragged(tokenizer.byte_rows()).take(types.values.astype(np.int64))
        self._types = Ragged(parts.values, parts.starts[types.starts])
        self._dropout = dropout
        self._key = absorb(as_keys([0]), as_keys([seed]))

    def epoch(self, epoch: int) -> EpochWords:
        """The segmentations of epoch `epoch`, from 0."""
        key = absorb(self._key, as_keys([epoch]))
        pair = np.repeat(np.arange(len(self._words)), self._words.lengths)
        place = np.arange(len(pair)) - self._words.starts[pair]
        drawn = absorb(absorb(key, pair.astype(np.uint64)), place.astype(np.uint64))
        variant = (drawn % np.uint64(VARIANTS)).astype(np.int64)
        code = self._words.values.astype(np.int64) * VARIANTS + variant
        used = np.zeros(len(self._types) * VARIANTS, dtype=np.bool_)
        used[code] = True
        codes = np.flatnonzero(used)
        keys = absorb(absorb(key, as_keys([1])), codes.astype(np.uint64))
        pieces = segment(self._table, self._types.take(codes // VARIANTS), keys, self._dropout)
        row = np.zeros(len(used), dtype=np.int64)
        row[codes] = np.arange(len(codes))
        return EpochWords(pieces, Ragged(row[code], self._words.starts))


class EpochWords:
    """The segmentation of one side in one epoch: of each pair, rows of `pieces`."""

    def __init__(self, pieces: Ragged, words: Ragged) -> None:
        self._pieces, self._words = pieces, words
        ends = _starts(pieces.lengths[words.values])
        self.lengths: Ints = np.diff(ends[words.starts])  # tokens of each pair, without EOS

    def rows(self, pairs: Ints) -> Ragged:
        """The tokens of these pairs, without EOS."""
        rows = self._words.take(pairs).values.astype(np.int64)
        values = self._pieces.take(rows).values
        return Ragged(values, _starts(self.lengths[pairs]))


# ---- sides of a dataset -----------------------------------------------------------------------


class EncodedSide:
    """One side of an encoded corpus: row i is tokens[offsets[i]:offsets[i + 1]], EOS at its end."""

    def __init__(self, tokens: NDArray[Any], offsets: Ints) -> None:
        self.tokens, self.offsets = tokens, offsets

    def row(self, pair: int) -> NDArray[Any]:
        """The plain segmentation of a pair."""
        row: NDArray[Any] = self.tokens[self.offsets[pair] : self.offsets[pair + 1]]
        return row

    def rows(self, epoch: int, pairs: Ints) -> list[NDArray[Any]]:
        """Some pairs as they are in an epoch."""
        # Places of all pairs are fetched at once: from far memory they come side by side.
        begins, ends = self.offsets[pairs].tolist(), self.offsets[pairs + 1].tolist()
        return [self.tokens[begin:end] for begin, end in zip(begins, ends, strict=True)]

    def lengths(self, epoch: int) -> NDArray[np.int32]:
        """Of all pairs in an epoch, EOS included."""
        return self._plain

    @cached_property
    def _plain(self) -> NDArray[np.int32]:
        """Made once, in pieces: offsets take twice the memory of lengths."""
        lengths = np.empty(len(self.offsets) - 1, dtype=np.int32)
        for first in range(0, len(lengths), _PIECE):
            part = self.offsets[first : first + _PIECE + 1]
            lengths[first : first + _PIECE] = part[1:] - part[:-1]
        lengths.flags.writeable = False  # every epoch sees this one
        return lengths


class DroppingSide(EncodedSide):
    """The same under BPE-dropout.

    A pair that would be longer than `longest` keeps its plain segmentation in that epoch.
    """

    def __init__(
        self, tokens: NDArray[Any], offsets: Ints, words: WordSampler, longest: int
    ) -> None:
        super().__init__(tokens, offsets)
        self._words, self._longest = words, longest
        self._epoch, self._drawn = -1, EpochWords(ragged([]), ragged([]))

    def rows(self, epoch: int, pairs: Ints) -> list[NDArray[Any]]:
        """Some pairs as they are cut in an epoch."""
        drawn = self._of(epoch)
        cut = drawn.rows(pairs)
        values = np.insert(cut.values.astype(self.tokens.dtype), cut.starts[1:], EOS_ID)
        starts = cut.starts + np.arange(len(pairs) + 1)
        return [
            values[starts[i] : starts[i + 1]]
            if starts[i + 1] - starts[i] <= self._longest
            else self.row(pair)
            for i, pair in enumerate(pairs.tolist())
        ]

    def lengths(self, epoch: int) -> NDArray[np.int32]:
        """Of all pairs in an epoch, EOS included."""
        drawn = (self._of(epoch).lengths + 1).astype(np.int32)
        return np.where(drawn <= self._longest, drawn, super().lengths(epoch))

    def _of(self, epoch: int) -> EpochWords:
        """The segmentations of one epoch are kept: it is asked for them batch after batch."""
        if epoch != self._epoch:
            self._epoch, self._drawn = epoch, self._words.epoch(epoch)
        return self._drawn
