"""Which length penalty gives the best score on a text: a grid of values, each with the true output
of the search.

Hypotheses are ranked by score / length^A (module `search`). Which of them are alive, and so which
end, does not hang on A; A decides how early the search may stop, by a bound that loses nothing
better, and which of those that ended is the best. A search for as many outputs as the beam is wide
never stops early, and, ranked by the lowest A, its list holds the best of every A from there on:

    Before its last step a sentence has fewer than K finished hypotheses. Those of the last step
    are all of one length, so that only the likeliest of them can be the best. So what is not among
    the K first at the lowest A is not the likeliest of its step, or stands behind a longer one;
    and a longer one that ranks higher at some A does so at every larger one.

So one search serves all values (`one_search`), where a text does not hang on the batch it was
searched in: in fp32 and int8. Elsewhere (bf16, fp16, parts of long lines, other engines) there is
a search for each value (`many_searches`).

Price: one search without its early stop and the texts of K hypotheses for each line; or some 14
searches. Scoring takes 0.3 s per 1000 lines for each value.

Shapes: none; this module is plain Python.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from mttrain.engine import TorchEngine
from mttrain.metrics import Comparison
from mttrain.segments import TranslateOptions
from mttrain.translations import TranslatedHypothesis, Translation
from mttrain.translator import Translator

STEP = 0.2
GRID = tuple(number / 5 for number in range(11))  # 0, 0.2, ... 2
MOST = 4.0  # as far as the grid goes on while its last value is the best
FINE = 0.1  # then this much below and above the best
_DIGITS = 2  # of a score; what reads the same counts as equal

Translate = Callable[[float], list[str]]
"""A length penalty -> the best output of each line with it."""
Progress = Callable[[Iterator[Translation]], Iterator[Translation]]
"""Wraps the translations of one search."""


@dataclass(frozen=True, slots=True)
class Point:
    """One length penalty: the texts that it gives, and their figures by name."""

    length_penalty: float
    texts: list[str]
    figures: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Tuning:
    """What was found; `points` by length penalty, which two of them are `present` and `best`."""

    metric: str
    points: list[Point]
    present: Point
    best: Point

    @property
    def at_edge(self) -> bool:
        """Whether the best is the first or the last value: one beyond may be better."""
        return self.best is not self.present and self.best in (self.points[0], self.points[-1])


def tune(
    translate: Translate,
    score: Callable[[list[str]], Mapping[str, float]],
    present: float,
    metric: str,
) -> Tuning:
    """Try `GRID` and the `present` length penalty, more while the last is the best, then `FINE`
    around the best.

    score: figures of the texts by name; the highest figure named `metric` wins. Of values that are
    equal to two digits, the one closest to the present one does, then the lower one. `translate`
    is called once for each value, the lowest of all being `lowest(present)`.
    """
    points: dict[float, Point] = {}

    def look(values: Sequence[float]) -> Point:
        for value in values:
            if value not in points:
                texts = translate(value)
                points[value] = Point(value, texts, score(texts))
        return min(points.values(), key=rank)

    def rank(point: Point) -> tuple[float, float, float]:
        away = round(abs(point.length_penalty - present), 6)
        return -round(point.figures[metric], _DIGITS), away, point.length_penalty

    best = look(sorted({*GRID, present}))
    while best.length_penalty == max(points) < MOST:
        best = look([round(max(points) + STEP, 6)])
    centre, least, most = best.length_penalty, min(points), max(points)
    around = (round(centre - FINE, 6), round(centre + FINE, 6))
    best = look([value for value in around if least <= value <= most])
    ordered = [points[value] for value in sorted(points)]
    return Tuning(metric, ordered, points[present], best)


def lowest(present: float) -> float:
    """The lowest value that `tune` tries."""
    return min(GRID[0], present)


# ---- the true output of the search ------------------------------------------------------------


def searches(
    translator: Translator, lines: Sequence[str], options: TranslateOptions, progress: Progress
) -> tuple[Translate, bool]:
    """What gives the output of the beam search for each length penalty that `tune` tries when
    that of `options` is the present one; and whether one search serves them all."""
    engine = translator.engine
    exact = isinstance(engine, TorchEngine) and engine.dtype in (torch.float32, torch.int8)
    if exact and not options.split_long:
        return one_search(translator, lines, options, progress), True
    return many_searches(translator, lines, options, progress), False


def many_searches(
    translator: Translator, lines: Sequence[str], options: TranslateOptions, progress: Progress
) -> Translate:
    """A search for each value."""

    def translate(length_penalty: float) -> list[str]:
        wanted = replace(options, length_penalty=length_penalty)
        return [found.text for found in progress(translator.translate_lines(lines, wanted))]

    return translate


def one_search(
    translator: Translator, lines: Sequence[str], options: TranslateOptions, progress: Progress
) -> Translate:
    """One search now, from whose lists each value takes its best."""
    least = lowest(options.length_penalty)
    wide = replace(options, nbest=options.beam, length_penalty=least)
    found = list(progress(translator.translate_lines(lines, wide)))

    def translate(length_penalty: float) -> list[str]:
        assert length_penalty >= least, "the lists hold the best from the lowest value upwards"
        ranking = replace(options, length_penalty=length_penalty)
        return [best_of(translation.hypotheses, ranking).text for translation in found]

    return translate


def best_of(
    hypotheses: Sequence[TranslatedHypothesis], options: TranslateOptions
) -> TranslatedHypothesis:
    """The one that the search would return: finished before unfinished, then by rank; of equal
    ones the shorter, which it found first."""

    def rank(hypothesis: TranslatedHypothesis) -> tuple[bool, float, int]:
        length, finished = len(hypothesis.tokens), hypothesis.finished
        return not finished, -options.ranked(hypothesis.score, length, finished), length

    return min(hypotheses, key=rank)


# ---- what it is worth -------------------------------------------------------------------------


def advice(tuning: Tuning, compared: Comparison | None) -> list[str]:
    """What to make of it, in sentences; compared: the best against the present one, None if they
    are the same."""
    now, best = (point.length_penalty for point in (tuning.present, tuning.best))
    if compared is None:
        return [f"No other value scores higher than the present length penalty {now:g}: keep it."]
    sentences = [f"The best length penalty is {best:g}; the present one is {now:g}."]
    if compared.p_value >= 0.05:
        sentences.append(
            f"A difference of {compared.delta:+.2f} may well be chance (p = "
            f"{compared.p_value:.4f}): that is no reason to change it."
        )
    if tuning.at_edge:
        sentences.append("It is at the end of the grid: values beyond it may be better.")
    return [
        *sentences,
        f"To use it: decode.length_penalty: {best:g} in the configuration of a run, or "
        f"--length-penalty {best:g} with translate and eval.",
    ]
