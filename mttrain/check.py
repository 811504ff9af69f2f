"""What is in a parallel corpus and what is wrong with it, counted before training.

`PairRules` decides which pairs are used; training filters with the same object, so what the report
counts is what is left out. `check_corpus` reads all splits once, in blocks, and reports pairs per
reason, lengths, repeated pairs, copies, and validation or test lines that training has seen.

Price: without a store the tokenizer's speed, with one the reading, and the tokenizer for the pairs
that the store skipped. Memory: 16 bytes a pair, for 64-bit hashes of the source and of the pair,
and 1 byte more at the end. Equal hashes are taken for equal text: among ten million lines that errs
with a probability of 3 in a million.
"""

from __future__ import annotations

import itertools
import operator
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mttrain.config import DataConfig
from mttrain.encoding import SIDES
from mttrain.hashing import absorb, as_keys
from mttrain.pairrules import BLANK, DUPLICATE, REASONS, USED, PairRules, blank_pairs
from mttrain.pairs import ParallelText, parallel_text
from mttrain.store import EncodedCorpus
from mttrain.storefiles import map_array
from mttrain.textblocks import decoded, text_blocks
from mttrain.tokenizer import Tokenizer

PERCENTILES = (50, 90, 95, 99, 100)
_REASONS = {
    "blank": "blank on one side or both",
    "too_long": "too long (more than {max_length} subwords on a side)",
    "ratio": "too unequal (one side more than {max_ratio} times the other)",
    "duplicate": "repeated",
}
_LENGTHS = (
    "source characters",
    "source subwords",
    "target characters",
    "target subwords",
    "longer side subwords",
)
_MANY = 0.1  # share of skipped pairs above which the report warns


# ---- the report -------------------------------------------------------------------------------


@dataclass(frozen=True)
class SplitReport:
    """The figures of one split: training, validation or test.

    `lengths` gives PERCENTILES over the pairs that are not blank, for each of `_LENGTHS`; subwords
    count a tag and EOS. In validation and test, skipped pairs lack in the loss only: BLEU takes
    all.
    """

    split: str
    files: list[list[str]]
    pairs: int
    skipped: dict[str, int]
    lengths: dict[str, list[int]]
    duplicates: int  # pairs that repeat an earlier one, used or not
    identical: int  # pairs with the same text on both sides
    overlap: int  # lines whose source is also a source of the training corpus; 0 for training

    @property
    def kept(self) -> int:
        return self.pairs - sum(self.skipped.values())


@dataclass(frozen=True)
class CorpusReport:
    """What `check_corpus` found; `text` is for people, `to_dict` for the log."""

    max_length: int
    max_ratio: float | None
    source_lang: str  # of the training text; "source" and "target" where there are several
    target_lang: str
    splits: list[SplitReport]

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON, with the pairs kept and the warnings."""
        data = asdict(self)
        for plain, split in zip(data["splits"], self.splits, strict=True):
            plain["kept"] = split.kept
        return {**data, "percentiles": list(PERCENTILES), "warnings": self.warnings()}

    def text(self) -> str:
        """A few lines per split, how to choose data.max_length, then the warnings."""
        lines = [line for split in self.splits for line in self._split_text(split)]
        lines.extend(self._length_advice(self.splits[0]))
        lines.extend(f"warning: {warning}" for warning in self.warnings())
        return "\n".join(lines)

    def warnings(self) -> list[str]:
        """What a careful person would look at before training; empty for a clean corpus."""
        found = []
        train = self.splits[0]
        skipped = train.pairs - train.kept
        if skipped > _MANY * train.pairs:
            found.append(
                f"{_share(skipped, train.pairs)} of the training pairs are skipped: "
                f"{self._skipped_text(train)}."
            )
        for split in self.splits[1:]:
            if split.overlap:
                found.append(
                    f"{split.overlap} of {split.pairs} {split.split} source lines are also in the "
                    "training corpus; scores on them say little about new text."
                )
        if train.identical > _MANY * train.pairs:
            found.append(
                f"{_share(train.identical, train.pairs)} of the training pairs have the same text "
                "on both sides; the model will learn to copy."
            )
        return found

    def _split_text(self, split: SplitReport) -> Iterator[str]:
        details = [f"{split.kept} of {split.pairs} pairs are used"]
        if split.duplicates:
            details.append(f"{split.duplicates} repeat an earlier pair")
        if split.identical:
            details.append(f"{split.identical} have equal sides")
        yield f"{split.split}: {'; '.join(details)}"
        if split.skipped:
            note = "" if split is self.splits[0] else " (in the loss; BLEU takes all lines)"
            yield f"  skipped{note}: {self._skipped_text(split)}"

    def _skipped_text(self, split: SplitReport) -> str:
        values = {"max_length": self.max_length, "max_ratio": self.max_ratio}
        return ", ".join(
            f"{count} {_REASONS[reason].format(**values)}"
            for reason, count in sorted(split.skipped.items())
        )

    def _length_advice(self, train: SplitReport) -> Iterator[str]:
        if not train.lengths:
            return
        heads = "".join(f"{f'{percentile} %':>8}" for percentile in PERCENTILES)
        yield f"  {'training pairs up to this length':<34}{heads}"
        for name, values in train.lengths.items():
            label = name.replace("source", self.source_lang).replace("target", self.target_lang)
            label = label.replace("subwords", "subwords with EOS")
            yield f"  {label:<34}" + "".join(f"{value:>8}" for value in values)
        longer = dict(zip(PERCENTILES, train.lengths["longer side subwords"], strict=True))
        yield (
            f"data.max_length is {self.max_length}: longer pairs are skipped, never cut. "
            f"{longer[99]} would keep 99 % of the training pairs, {longer[100]} all."
        )


def _share(part: int, whole: int) -> str:
    return f"{100 * part / whole:.3g} %"


# ---- counting ---------------------------------------------------------------------------------


def check_corpus(
    data: DataConfig,
    tokenizers: tuple[Tokenizer, Tokenizer],
    *,
    stores: Sequence[EncodedCorpus] = (),
    progress: Callable[[int], None] | None = None,
) -> CorpusReport:
    """Read all text files of a configuration and report on them.

    `tokenizers` are those of source and target. `stores`: of the same text, encoded by these
    tokenizers and these rules; the lengths of the pairs there are not counted again. `progress` is
    called with the number of pairs read so far. DataError when a file is missing, not UTF-8, empty
    or out of step with its partner.
    """
    encoded = {store.index["split"]: store for store in stores}
    rules = PairRules(data.max_length, data.max_ratio, data.drop_duplicates)
    texts = [parallel_text(corpus, data) for corpus in data.train]
    train = _Tally(texts, rules, tokenizers)
    train.read(encoded.get("train"), progress)
    splits = [train.report("training", None)]
    for key, name, corpus in (("valid", "validation", data.valid), ("test", "test", data.test)):
        if corpus is not None:
            tally = _Tally([parallel_text(corpus, data)], PairRules(data.max_length), tokenizers)
            tally.read(encoded.get(key), None)
            splits.append(tally.report(name, train))
    sides = zip(*(text.langs for text in texts), strict=True)
    names = [
        langs[0] if len(set(langs)) == 1 else side
        for langs, side in zip(sides, ("source", "target"), strict=True)
    ]
    return CorpusReport(data.max_length, data.max_ratio, names[0], names[1], splits)


class _Stored:
    """The lengths of the pairs of a store, in the order of the text."""

    def __init__(self, store: EncodedCorpus) -> None:
        self._lines = map_array(store.part("lines"), "int64")
        self._offsets = [map_array(store.part(f"{side}.offsets"), "int64") for side in SIDES]
        self._ends = np.cumsum([0, *(corpus["pairs"] for corpus in store.index["corpora"])])
        self._at = 0

    def lengths(self, shard: int, lines: NDArray[np.int64]) -> NDArray[np.int64]:
        """[2, N] subwords of the pairs of a shard with these ascending line numbers, EOS and tag
        included; 0 where the store has none. Each call goes on behind the one before."""
        first, end = max(self._at, self._ends[shard]), self._ends[shard + 1]
        count = int(np.searchsorted(self._lines[first:end], lines[-1], side="right"))
        self._at = first + count
        found = np.zeros((len(SIDES), len(lines)), dtype=np.int64)
        places = np.searchsorted(lines, self._lines[first : self._at])
        for row, offsets in zip(found, self._offsets, strict=True):
            row[places] = np.diff(offsets[first : self._at + 1])
        return found


class _Tally:
    """Running figures of one split: two hashes per pair, and how often each length occurs."""

    def __init__(
        self,
        texts: Sequence[ParallelText],
        rules: PairRules,
        tokenizers: tuple[Tokenizer, Tokenizer],
    ) -> None:
        self.texts, self.rules, self.tokenizers = texts, rules, tokenizers
        self.pairs = self.identical = 0
        self.codes = np.zeros(1 + len(REASONS), dtype=np.int64)
        self.lengths = [Counter[int]() for _ in _LENGTHS]  # of the pairs that are not blank
        self.sources, self.hashes = array("Q"), array("Q")

    def read(self, store: EncodedCorpus | None, progress: Callable[[int], None] | None) -> None:
        """Count all pairs."""
        stored, numbers = None if store is None else _Stored(store), itertools.count()
        for text in self.texts:
            before = self.pairs
            for shard in text.shards():
                number = next(numbers)
                for block in text_blocks(shard):
                    known = None if stored is None else stored.lengths(number, block.lines)
                    self._add(decoded(block), known, text.tag)
                    if progress is not None:
                        progress(self.pairs)
            if self.pairs == before:
                raise text.without_pairs()

    def _add(
        self, texts: tuple[list[str], list[str]], known: NDArray[np.int64] | None, tag: str | None
    ) -> None:
        """N pairs; known [2, N]: lengths as `_Stored` gives them."""
        size, blank, tagged = len(texts[0]), blank_pairs(*texts), int(tag is not None)
        lengths = np.zeros((len(SIDES), size), dtype=np.int64) if known is None else known
        kept = lengths[0] > 0
        others = np.flatnonzero(~kept & ~blank)
        for row, tokenizer, lines in zip(lengths, self.tokenizers, texts, strict=True):
            ids = tokenizer.encode_batch([lines[at] for at in others.tolist()])
            row[others] = _numbers(map(len, ids), len(ids)) + 1
        lengths[0, others] += tagged
        codes = self.rules.codes(lengths[0] - tagged, lengths[1], blank, bool(tagged))
        sources, targets = (_numbers(map(hash, lines), size).view(np.uint64) for lines in texts)
        hashes = absorb(absorb(as_keys([hash(tag)]), sources), targets)
        if self.rules.drop_duplicates:
            used = np.flatnonzero(codes == USED)
            new = self.rules.new(hashes[used]) if known is None else kept[used]
            codes[used[~new]] = DUPLICATE
        self.sources.frombytes(sources.tobytes())
        self.hashes.frombytes(hashes.tobytes())
        self.codes += np.bincount(codes, minlength=len(self.codes))
        self.pairs += size
        read = codes != BLANK
        same = np.fromiter(map(operator.eq, *texts), dtype=np.bool_, count=size)
        self.identical += int((same & read).sum())
        characters = [_numbers(map(len, lines), size) for lines in texts]
        columns = (characters[0], lengths[0], characters[1], lengths[1], lengths.max(axis=0))
        for counts, column in zip(self.lengths, columns, strict=True):
            values, times = np.unique(column[read], return_counts=True)
            counts.update(dict(zip(values.tolist(), times.tolist(), strict=True)))

    def report(self, split: str, train: _Tally | None) -> SplitReport:
        """The figures; those of `train` were reported before."""
        hashes, sources = (np.frombuffer(some, np.uint64) for some in (self.hashes, self.sources))
        hashes.sort()  # in place: copies would be as large as all that is held
        sources.sort()
        overlap = 0
        if train is not None:
            known = np.frombuffer(train.sources, np.uint64)
            at = np.searchsorted(known, sources)
            overlap = int((known[np.minimum(at, len(known) - 1)] == sources).sum())
        counts = zip(REASONS, self.codes[1:].tolist(), strict=True)
        return SplitReport(
            split=split,
            files=[text.all_files() for text in self.texts],
            pairs=self.pairs,
            skipped={reason: count for reason, count in sorted(counts) if count},
            lengths={
                name: _percentiles(counts)
                for name, counts in zip(_LENGTHS, self.lengths, strict=True)
                if counts
            },
            duplicates=int((hashes[1:] == hashes[:-1]).sum()),
            identical=self.identical,
            overlap=overlap,
        )


def _numbers(values: Iterable[int], count: int) -> NDArray[np.int64]:
    return np.fromiter(values, dtype=np.int64, count=count)


def _percentiles(counts: Counter[int]) -> list[int]:
    """PERCENTILES of values that occur so often: the least that so many per cent do not exceed."""
    values = sorted(counts)
    ends = np.cumsum([counts[value] for value in values])
    places = [np.searchsorted(ends, -(-percent * ends[-1] // 100)) for percent in PERCENTILES]
    return [values[place] for place in places]
