"""What is in a parallel corpus and what is wrong with it, counted before training.

`PairRules` decides which pairs are used; training filters with the same object, so what the report
counts is what is left out. `check_corpus` reads all splits once, in blocks, and reports pairs per
reason, lengths, repeated pairs, copies, and validation or test lines that training has seen.

Price: the tokenizer's speed (about 20,000 pairs of short sentences per second on two cores) and
some 32 bytes of memory per pair, for lengths and 64-bit hashes. Equal hashes are taken for equal
lines: among ten million lines that errs with a probability of 3 in a million.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mttrain.config import DataConfig
from mttrain.corpus import Pair, in_blocks
from mttrain.pairrules import DUPLICATE, REASONS, USED, PairRules, pair_hash, text_hash
from mttrain.pairs import ParallelText, parallel_text
from mttrain.tokenizer import Tokenizer

PERCENTILES = (50, 90, 95, 99, 100)
_REASONS = {
    "blank": "blank on one side or both",
    "too_long": "too long (more than {max_length} subwords on a side)",
    "ratio": "too unequal (one side more than {max_ratio} times the other)",
    "duplicate": "repeated",
}
_BLOCK = 4096
_MANY = 0.1  # share of skipped pairs above which the report warns


# ---- the report -------------------------------------------------------------------------------


@dataclass(frozen=True)
class SplitReport:
    """The figures of one split: training, validation or test.

    `lengths` gives PERCENTILES over the pairs that are not blank, for "source characters", "source
    subwords", "target characters", "target subwords" and "longer side subwords"; subwords count
    a tag and EOS. In validation and test, skipped pairs lack in the loss only: BLEU takes all.
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
    progress: Callable[[int], None] | None = None,
) -> CorpusReport:
    """Read all text files of a configuration and report on them.

    `tokenizers` are those of source and target. `progress` is called with the number of pairs read
    so far. DataError when a file is missing, not UTF-8, empty or out of step with its partner.
    """
    rules = PairRules(data.max_length, data.max_ratio, data.drop_duplicates)
    texts = [parallel_text(corpus, data) for corpus in data.train]
    train = _Tally(texts, rules).read(tokenizers, progress)
    splits = [train.report("training", None)]
    for name, corpus in (("validation", data.valid), ("test", data.test)):
        if corpus is not None:
            text = parallel_text(corpus, data)
            tally = _Tally([text], PairRules(data.max_length)).read(tokenizers, None)
            splits.append(tally.report(name, train))
    sides = zip(*(text.langs for text in texts), strict=True)
    names = [
        langs[0] if len(set(langs)) == 1 else side
        for langs, side in zip(sides, ("source", "target"), strict=True)
    ]
    return CorpusReport(data.max_length, data.max_ratio, names[0], names[1], splits)


class _Tally:
    """Running figures of one split: numbers per pair, no text."""

    def __init__(self, texts: Sequence[ParallelText], rules: PairRules) -> None:
        self.texts = texts
        self.rules = rules
        self.pairs = 0
        self.identical = 0
        self.skipped: Counter[str] = Counter()
        self.lengths = array("i")  # 4 numbers for each pair that is not blank
        self.sources, self.hashes = array("Q"), array("Q")

    def read(
        self, tokenizers: tuple[Tokenizer, Tokenizer], progress: Callable[[int], None] | None
    ) -> _Tally:
        for text in self.texts:
            for block in in_blocks(text.required_pairs(), _BLOCK):
                self._add(block, tokenizers, text.tag)
                if progress is not None:
                    progress(self.pairs)
        return self

    def _add(
        self, block: list[Pair], tokenizers: tuple[Tokenizer, Tokenizer], tag: str | None
    ) -> None:
        sources = tokenizers[0].encode_batch([pair.source for pair in block])
        targets = tokenizers[1].encode_batch([pair.target for pair in block])
        one, two = (np.array([len(ids) + 1 for ids in side]) for side in (sources, targets))
        blank = [not pair.source.strip() or not pair.target.strip() for pair in block]
        codes = self.rules.codes(one, two, np.array(blank, dtype=np.bool_), tag is not None)
        hashes = [pair_hash(pair.source, pair.target, tag) for pair in block]
        if self.rules.drop_duplicates:
            used = np.flatnonzero(codes == USED)
            new = self.rules.new(np.array(hashes, dtype=np.uint64)[used])
            codes[used[~new]] = DUPLICATE
        self.hashes.extend(hashes)
        self.sources.extend(text_hash(pair.source) for pair in block)
        for pair, source, target, code in zip(block, one, two, codes.tolist(), strict=True):
            reason = None if code == USED else REASONS[code - 1]
            if reason is not None:
                self.skipped[reason] += 1
            if reason != "blank":
                read = int(source) + (tag is not None)
                self.lengths.extend((len(pair.source), read, len(pair.target), int(target)))
                self.identical += pair.source == pair.target
        self.pairs += len(block)

    def report(self, split: str, train: _Tally | None) -> SplitReport:
        sources = np.asarray(self.sources)
        overlap = 0 if train is None else int(np.isin(sources, np.asarray(train.sources)).sum())
        return SplitReport(
            split=split,
            files=[text.all_files() for text in self.texts],
            pairs=self.pairs,
            skipped=dict(sorted(self.skipped.items())),
            lengths=_percentiles(np.asarray(self.lengths).reshape(-1, 4)),
            duplicates=self.pairs - len(np.unique(np.asarray(self.hashes))),
            identical=self.identical,
            overlap=overlap,
        )


def _percentiles(lengths: NDArray[np.int32]) -> dict[str, list[int]]:
    """PERCENTILES of the columns: the least length that so many per cent of pairs do not exceed."""
    if not len(lengths):
        return {}
    columns = {
        "source characters": lengths[:, 0],
        "source subwords": lengths[:, 1],
        "target characters": lengths[:, 2],
        "target subwords": lengths[:, 3],
        "longer side subwords": lengths[:, [1, 3]].max(axis=1),
    }
    return {
        name: [int(value) for value in np.percentile(column, PERCENTILES, method="inverted_cdf")]
        for name, column in columns.items()
    }
