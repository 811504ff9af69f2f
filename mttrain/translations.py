"""What a translation is, the lines it is written as, and the counts of the closing summary.

Layouts of the output:

    text                 the translation, one line per input line
    text with scores     i ||| text ||| score ||| ranked, also for n-best lists: then the lines of
    or n-best            one input follow each other, best first. i counts input lines from 0, as
                         in the n-best lists of Moses and Marian. A text may hold "|||" itself:
                         split once from the left and twice from the right.
    jsonl                one JSON object per input line: line (from 1), source, text, score, ranked,
                         finished, ids (without EOS), flags, and, for n-best, hypotheses

score is the natural log-probability of the tokens and EOS; ranked is score / length^A. Where the
output was chosen otherwise, jsonl tells by what: utility (module mbr), or reranked and
rerank_scores (module rerank).

Shapes: none; this module is plain Python.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

Layout = Literal["text", "jsonl"]

_SHOWN = 5  # line numbers named per kind of trouble
_LONGEST_BLOCK = 10  # tokens of a repeated block
_REPEATS = 3  # how often a block must come again,
_REPEATED = 8  # and how many tokens it must repeat in all, to count as a loop


@dataclass(frozen=True, slots=True)
class TranslatedHypothesis:
    """One output as text; `tokens` are its target ids without EOS."""

    text: str
    score: float  # natural log-probability, EOS included if finished
    ranked: float  # score / length^A
    finished: bool  # False: cut at the length limit, no EOS
    tokens: tuple[int, ...]
    utility: float | None = None  # expected, 0 to 100, where MBR decoding chose
    reranked: float | None = None  # what other models made of `ranked`, where these reranked,
    rerank_scores: tuple[float, ...] = ()  # and the score / length^A of each of them


@dataclass(frozen=True, slots=True)
class Translation:
    """The outputs for one input line, best first, and what happened to it."""

    line: int  # from 1
    source: str
    hypotheses: tuple[TranslatedHypothesis, ...]
    blank: bool = False  # nothing but white space: not translated
    source_cut: bool = False  # more subwords than the model may read; the rest was dropped
    hit_limit: bool = False  # the best output was cut at the length limit
    looped: bool = False  # the best output repeats itself
    pieces: int = 1  # parts that a long line was split into

    @property
    def text(self) -> str:
        """The best output."""
        return self.hypotheses[0].text

    @property
    def empty(self) -> bool:
        """Nothing came out though something went in."""
        return not self.blank and not self.text.strip()

    def reordered(self, hypotheses: Sequence[TranslatedHypothesis]) -> Translation:
        """The same line with its hypotheses in another order, or with more known of them."""
        best = hypotheses[0]
        return replace(
            self,
            hypotheses=tuple(hypotheses),
            hit_limit=not best.finished,
            looped=has_loop(best.tokens),
        )

    def flags(self) -> list[str]:
        """Names of what happened, for JSON."""
        names = ("blank", "source_cut", "hit_limit", "looped", "empty")
        flags = [name for name in names if getattr(self, name)]
        return [*flags, "split"] if self.pieces > 1 else flags


def has_loop(tokens: Sequence[int]) -> bool:
    """True when a block of 1 to 10 tokens comes four times in a row or more, 9 tokens at least.

    A word said three times, as people do, is no loop.
    """
    if len(tokens) - len(set(tokens)) < _REPEATED:
        return False
    for period in range(1, _LONGEST_BLOCK + 1):
        run = 0
        for at in range(period, len(tokens)):
            run = run + 1 if tokens[at] == tokens[at - period] else 0
            if run >= max(_REPEATS * period, _REPEATED):
                return True
    return False


# ---- writing ----------------------------------------------------------------------------------


def output_lines(
    translation: Translation, *, layout: Layout = "text", nbest: int = 1, scores: bool = False
) -> list[str]:
    """The lines to write for one input line; exactly one, but for n-best lists as text."""
    if layout == "jsonl":
        return [_json_line(translation, nbest)]
    if nbest == 1 and not scores:
        return [translation.text]
    return [
        f"{translation.line - 1} ||| {h.text} ||| {h.score:.6f} ||| {h.ranked:.6f}"
        for h in translation.hypotheses[:nbest]
    ]


def _json_line(translation: Translation, nbest: int) -> str:
    content: dict[str, object] = {"line": translation.line, "source": translation.source}
    content |= _fields(translation.hypotheses[0])
    content["flags"] = translation.flags()
    if nbest > 1:
        content["hypotheses"] = [_fields(h) for h in translation.hypotheses[:nbest]]
    return json.dumps(content, ensure_ascii=False, allow_nan=False)


def _fields(hypothesis: TranslatedHypothesis) -> dict[str, object]:
    fields: dict[str, object] = {
        "text": hypothesis.text,
        "score": hypothesis.score,
        "ranked": hypothesis.ranked,
        "finished": hypothesis.finished,
        "ids": list(hypothesis.tokens),
    }
    if hypothesis.utility is not None:
        fields["utility"] = hypothesis.utility
    if hypothesis.reranked is not None:
        fields["reranked"] = hypothesis.reranked
        fields["rerank_scores"] = list(hypothesis.rerank_scores)
    return fields


# ---- the closing summary ----------------------------------------------------------------------


@dataclass(slots=True)
class Summary:
    """Counts what deserves a look. Add each translation; `replaced` is filled by the reader."""

    started: float = field(default_factory=time.perf_counter)
    lines: int = 0
    blank: int = 0
    split: list[int] = field(default_factory=list)  # line numbers, here and below
    source_cut: list[int] = field(default_factory=list)
    hit_limit: list[int] = field(default_factory=list)
    looped: list[int] = field(default_factory=list)
    empty: list[int] = field(default_factory=list)
    replaced: list[int] = field(default_factory=list)

    def add(self, translation: Translation) -> None:
        """Count one translation."""
        self.lines += 1
        self.blank += translation.blank
        for flag, numbers in (
            (translation.pieces > 1, self.split),
            (translation.source_cut, self.source_cut),
            (translation.hit_limit, self.hit_limit),
            (translation.looped, self.looped),
            (translation.empty, self.empty),
        ):
            if flag:
                numbers.append(translation.line)

    @property
    def seconds(self) -> float:
        """Time since the summary was made."""
        return time.perf_counter() - self.started

    def text(self) -> str:
        """One line on the whole, then one line for each kind of trouble there was."""
        seconds = self.seconds
        speed = self.lines / max(seconds, 1e-9)
        blank = f", {self.blank} of them blank" if self.blank else ""
        lines = [f"{_count(self.lines)}{blank}, in {seconds:.1f} s ({speed:.1f} lines/s)"]
        for numbers, what in (
            (self.replaced, "held bytes that are not UTF-8; they were replaced by U+FFFD"),
            (self.split, "were long and were translated in parts"),
            (self.source_cut, "had more subwords than the limit; what followed was left out"),
            (self.hit_limit, "were cut at the output limit (--max-length)"),
            (self.looped, "came out with a repeating loop"),
            (self.empty, "came out empty"),
        ):
            if numbers:
                lines.append(lines_warning(numbers, what))
        return "\n".join(lines)


def lines_warning(numbers: Sequence[int], what: str) -> str:
    """The warning that these lines (from 1) `what`, such as "came out empty"; the first by name."""
    if len(numbers) == 1 and what.startswith("were "):
        what = what.replace("were ", "was ")
    return f"warning: {_count(len(numbers))} {what}: {_listed(numbers)}"


def _count(number: int) -> str:
    return f"{number:,} line" if number == 1 else f"{number:,} lines"


def _listed(numbers: Sequence[int]) -> str:
    shown = ", ".join(map(str, numbers[:_SHOWN]))
    more = f" and {len(numbers) - _SHOWN:,} more" if len(numbers) > _SHOWN else ""
    return f"line {shown}{more}"
