"""Counts what is wrong with parallel text, line by line, before anything is learned from it.

`check_text` reads each corpus once, as a stream of pairs, applies the rules of `textrules` and the
language tests of `textsides`, finds what repeats, and compares with held-out text; with tokenizers
it counts in subwords what training would leave out, by the very `PairRules` that training uses.

Price: some 25,000 pairs of short sentences a second on one core, with a tokenizer half of that, as
`check.check_corpus`; 40 bytes of memory a pair; held-out text is kept in memory. Equal 64-bit
hashes are taken for equal lines, as there.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from mttrain.check import PERCENTILES
from mttrain.corpus import Pair, in_blocks
from mttrain.pairrules import RATIO, TOO_LONG, USED, PairRules
from mttrain.textreport import NAMED, SIDES, Finding, TextReport
from mttrain.textrules import RULES, excerpt, line_faults, pair_faults
from mttrain.textsides import LEARN_FROM, Sides, looks_like
from mttrain.tokenizer import Tokenizer

CHARACTER_RATIO = 3.0  # times the usual ratio of lengths, where none is given
_SHORT = 30  # characters below which a ratio of lengths says nothing
_MOSTLY = 0.2  # share of a side's lines that makes it tokenized
_FEW = 50  # lines with letters that have case, below which no side is called lower-cased
_CAPITALS = 0.01  # share of lines with a capital below which a side is lower-cased
_SLOTS = 1 << 24  # of the table that guesses which lines repeat, to keep their text as an example
_CANDIDATES = 200


# ---- what repeats -----------------------------------------------------------------------------


class _Repeats:
    """Which lines repeat earlier ones: exact by their hashes at the end, 8 bytes a line.

    A small table guesses meanwhile, and never misses one; so the first ones keep their text.
    """

    def __init__(self) -> None:
        self.hashes = array("q")
        self._seen = bytearray(_SLOTS)

    def add(self, value: int) -> bool:
        """Remember a hash; whether it may have come before."""
        self.hashes.append(value)
        slot = value % _SLOTS
        seen = self._seen[slot]
        self._seen[slot] = 1
        return bool(seen)

    def repeated(self, chosen: NDArray[np.bool_] | None = None) -> NDArray[np.bool_]:
        """For each line whether an earlier one was the same, among the chosen ones."""
        hashes = np.asarray(self.hashes)
        places = np.arange(len(hashes)) if chosen is None else np.flatnonzero(chosen)
        order = places[np.argsort(hashes[places], kind="stable")]
        marks = np.zeros(len(hashes), dtype=np.bool_)
        marks[order[1:]] = hashes[order[1:]] == hashes[order[:-1]]
        return marks


class _Memory:
    """The repeats of all training corpora, in the order they were read."""

    def __init__(self) -> None:
        self.kinds = {"duplicate": _Repeats(), "source": _Repeats(), "target": _Repeats()}
        self.candidates: dict[int, Pair] = {}
        self.count = 0
        self.kept = 0

    def begin(self) -> int:
        """The place of the first pair of another corpus, which has examples of its own."""
        self.kept = 0
        return self.count

    def add(self, pair: Pair) -> None:
        # A blank line repeats nothing: it is counted as blank, so it gets a hash of its own.
        source = (pair.source.strip() and pair.source) or ("", self.count)
        target = (pair.target.strip() and pair.target) or ("", self.count)
        seen = self.kinds["duplicate"].add(hash((source, target)))
        seen |= self.kinds["source"].add(hash(source)) | self.kinds["target"].add(hash(target))
        if seen and self.kept < _CANDIDATES:
            self.candidates[self.count] = pair
            self.kept += 1
        self.count += 1

    def marks(self) -> dict[str, NDArray[np.bool_]]:
        """Kind of finding -> for each pair whether it is one."""
        duplicate = self.kinds["duplicate"].repeated()
        return {
            "duplicate": duplicate,
            "several_targets": self.kinds["source"].repeated(~duplicate),
            "several_sources": self.kinds["target"].repeated(~duplicate),
        }

    def findings(self, begin: int, end: int, lines: Sequence[int]) -> Iterator[Finding]:
        """Those of the pairs from `begin` to `end`, whose line numbers are `lines`."""
        for kind, marks in self.marks().items():
            places = np.flatnonzero(marks[begin:end])
            if not len(places):
                continue
            finding = Finding(kind, None, len(places), end - begin)
            finding.lines = [lines[place] for place in places[:NAMED].tolist()]
            shown = self.candidates.get(begin + int(places[0]))
            if shown is not None:
                finding.example = {"line": finding.lines[0], **_both(shown)}
            yield finding


def _both(pair: Pair) -> dict[str, str]:
    return {"source": excerpt(pair.source), "target": excerpt(pair.target)}


class Text(NamedTuple):
    """A corpus: its name, its pairs, and the languages that it is said to be in."""

    name: str
    pairs: Iterable[Pair]
    langs: tuple[str | None, str | None] = (None, None)


# ---- one corpus -------------------------------------------------------------------------------


class _Tally:
    """Running figures of one corpus."""

    def __init__(self, check: _Check, text: Text, role: str) -> None:
        self.check, self.name, self.langs, self.role = check, text.name, text.langs, role
        self.found: dict[tuple[str, str | None], Finding] = {}
        self.pairs = 0
        self.spaced, self.cased, self.capital = [0, 0], [0, 0], [0, 0]
        self.lengths = array(
            "i"
        )  # per pair that is not blank: characters, with tokenizers subwords
        self.numbers = array("q")  # line numbers of the training pairs
        self.sides: Sides | None = None
        self.usual = 0.0  # logarithm of the usual ratio of lengths

    def learn(self, pairs: Sequence[Pair], sides: Sides | None) -> None:
        """From the first pairs: what each side looks like. sides: as the training text has them."""
        self.sides = sides or Sides(pairs)
        usable = [p for p in pairs if min(len(p.source), len(p.target)) >= _SHORT]
        ratios = sorted(math.log(len(p.target) / len(p.source)) for p in usable)
        self.usual = ratios[len(ratios) // 2] if ratios else 0.0
        for side, lang in enumerate(self.langs):
            lines = [(pair.source, pair.target)[side] for pair in pairs]
            other = looks_like(lines, lang)
            if other is not None:
                found = self.found["language", SIDES[side]] = Finding("language", SIDES[side])
                found.detail = f"it is said to be {lang} and looks like {other}"
        if sides is None and self.sides.same_language:
            found = self.found["same_language", None] = Finding("same_language")
            found.detail = f"{100 * self.sides.same_language:.0f} % of the words are common"

    def add(self, block: Sequence[Pair]) -> None:
        """Look at some more pairs."""
        encode = self.check.encode
        subwords = [(0, 0, USED)] * len(block) if encode is None else encode(block)
        for pair, counted in zip(block, subwords, strict=True):
            self._add(pair, *counted)
        self.pairs += len(block)

    def _add(self, pair: Pair, source_subwords: int, target_subwords: int, code: int) -> None:
        texts = (pair.source, pair.target)
        for side, text in enumerate(texts):
            for kind, at in line_faults(text):
                self._note(kind, pair, side, at)
            self._count_style(text, side, pair)
        if not pair.source.strip() or not pair.target.strip():
            self._note("blank", pair)
            return
        for kind in pair_faults(pair):
            self._note(kind, pair)
        assert self.sides is not None, "learn comes first"
        wrong = self.sides.wrong(pair)
        if wrong == "swapped":
            self._note("swapped", pair)
        elif wrong is not None:
            self._note("untranslated", pair, SIDES.index(wrong))
        characters = len(pair.source), len(pair.target)
        if max(characters) >= _SHORT:
            ratio = abs(math.log(characters[1] / characters[0]) - self.usual)
            if ratio > math.log(self.check.character_ratio):
                self._note("ratio", pair)
        self.lengths.extend(characters)
        if source_subwords:
            self.lengths.extend((source_subwords, target_subwords))
            if code in (TOO_LONG, RATIO):
                self._note("too_long" if code == TOO_LONG else "subword_ratio", pair)

    def _note(self, kind: str, pair: Pair, side: int | None = None, at: int = 0) -> None:
        name = None if side is None else SIDES[side]
        finding = self.found.get((kind, name))
        if finding is None:
            finding = self.found[kind, name] = Finding(kind, name)

        def example() -> dict[str, str]:
            if side is None:
                return _both(pair)
            return {SIDES[side]: excerpt((pair.source, pair.target)[side], at)}

        finding.note(pair.line, example)

    def _count_style(self, text: str, side: int, pair: Pair) -> None:
        if " ." in text or " ," in text:
            at = max(text.find(" ."), text.find(" ,"))
            if text[at + 2 : at + 3] in ("", " "):  # not " .NET", nor " ..."
                self._note("tokenized", pair, side, at)
        lower = text.lower()
        if lower != text.upper():
            self.cased[side] += 1
            if lower != text:
                self.capital[side] += 1
            else:
                self._note("lowercased", pair, side)

    def report(self, more: Iterable[Finding] = ()) -> TextReport:
        """The findings in the order of the rules; what is rare enough to be style is left out."""
        for side, name in enumerate(SIDES):
            tokenized = self.found.get(("tokenized", name))
            if tokenized is not None and tokenized.count < _MOSTLY * self.pairs:
                del self.found["tokenized", name]
            if self.capital[side] > _CAPITALS * self.cased[side] or self.cased[side] < _FEW:
                self.found.pop(("lowercased", name), None)
        found = [*self.found.values(), *more]
        for finding in found:
            finding.of = finding.of or self.pairs
        order = list(RULES)
        found.sort(key=lambda finding: (order.index(finding.kind), finding.side or ""))
        return TextReport(self.name, self.role, self.pairs, self._percentiles(), found)

    def _percentiles(self) -> dict[str, list[int]]:
        names = ["source characters", "target characters"]
        if self.check.encode is not None:
            names += ["source subwords", "target subwords"]
        table = np.asarray(self.lengths).reshape(-1, len(names))
        if not len(table):
            return {}
        values = np.percentile(table, PERCENTILES, axis=0, method="inverted_cdf")
        return {name: list(map(int, values[:, i])) for i, name in enumerate(names)}


class _HeldOut:
    """Validation or test text, and which of its lines the training text has, too."""

    def __init__(self, text: Text, role: str) -> None:
        self.text, self.role, self.pairs = text, role, list(text.pairs)
        self.by_source: dict[str, list[Pair]] = {}
        for pair in self.pairs:
            if pair.source.strip():
                self.by_source.setdefault(pair.source, []).append(pair)
        self.met: dict[str, None] = {}
        self.whole: set[str] = set()  # sources that came with the target they have here

    def meet(self, pair: Pair) -> None:
        """See a pair of the training text."""
        mine = self.by_source.get(pair.source)
        if mine is not None:
            self.met[pair.source] = None
            if any(pair.target == own.target for own in mine):
                self.whole.add(pair.source)

    def findings(self) -> list[Finding]:
        """One finding, or none."""
        finding = Finding("overlap", "source")
        met = (pair for source in self.met for pair in self.by_source[source])
        for pair in sorted(met, key=lambda pair: pair.line):
            finding.note(pair.line, lambda pair=pair: {"source": excerpt(pair.source)})  # type: ignore[misc]
        finding.detail = f"{len(self.whole):,} with the same target"
        return [finding] if finding.count else []


# ---- all of them ------------------------------------------------------------------------------


@dataclass
class _Check:
    """What holds for all corpora of one check."""

    character_ratio: float
    encode: Callable[[Sequence[Pair]], list[tuple[int, int, int]]] | None = None


def check_text(
    training: Sequence[Text],
    held_out: Sequence[tuple[str, Text]] = (),
    *,
    tokenizers: tuple[Tokenizer, Tokenizer] | None = None,
    max_length: int = 256,
    max_ratio: float | None = None,
    progress: Callable[[int], None] | None = None,
) -> list[TextReport]:
    """A report for each training corpus, then for each of `held_out`: (role, text).

    max_length and max_ratio: as data.max_length and data.max_ratio, in subwords; the ratio is held
    in characters, too, as a factor around the usual ratio of the corpus. progress: called with the
    number of training pairs read. DataError from the pairs' readers.
    """
    check, rules = _Check(max_ratio or CHARACTER_RATIO), PairRules(max_length, max_ratio)
    if tokenizers is not None:
        check.encode = lambda pairs: _subwords(pairs, tokenizers, rules)
    others = [_HeldOut(text, role) for role, text in held_out]
    memory, tallies, spans = _Memory(), [], []
    for text in training:
        tally, begin = _Tally(check, text, "training"), memory.begin()
        for block in in_blocks(text.pairs, LEARN_FROM):
            if tally.sides is None:
                tally.learn(block, None)
            tally.add(block)
            for pair in block:
                memory.add(pair)
                for other in others:
                    other.meet(pair)
            tally.numbers.extend([pair.line for pair in block])
            if progress is not None:
                progress(memory.count)
        tallies.append(tally)
        spans.append((begin, memory.count))
    reports = [
        tally.report([*memory.findings(*span, tally.numbers), *_nothing(tally)])
        for tally, span in zip(tallies, spans, strict=True)
    ]
    return reports + [_held_out_report(check, other, tallies) for other in others]


def _held_out_report(check: _Check, other: _HeldOut, training: Sequence[_Tally]) -> TextReport:
    tally = _Tally(check, other.text, other.role)
    alike = (one.sides for one in training if one.langs == other.text.langs)
    tally.learn(other.pairs, next(alike, None))
    tally.add(other.pairs)
    return tally.report([*other.findings(), *_nothing(tally)])


def _nothing(tally: _Tally) -> list[Finding]:
    return [] if tally.pairs else [Finding("empty")]


def _subwords(
    pairs: Sequence[Pair], tokenizers: tuple[Tokenizer, Tokenizer], rules: PairRules
) -> list[tuple[int, int, int]]:
    """Of each pair the lengths in subwords, EOS included, and what the rules say of them."""
    sources = tokenizers[0].encode_batch([pair.source for pair in pairs])
    targets = tokenizers[1].encode_batch([pair.target for pair in pairs])
    one, two = (np.array([len(ids) + 1 for ids in side]) for side in (sources, targets))
    codes = rules.codes(one, two, np.zeros(len(pairs), dtype=np.bool_), tagged=False)
    return list(zip(one.tolist(), two.tolist(), codes.tolist(), strict=True))
