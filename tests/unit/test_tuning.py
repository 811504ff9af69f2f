"""The search for a length penalty: which values are tried, which wins, and that one search gives
the very outputs of a search for each value."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from mttrain.checkpoint import ModelBundle
from mttrain.metrics import Comparison
from mttrain.search import Hypothesis, SearchOptions, beam_search
from mttrain.segments import TranslateOptions
from mttrain.tokenizer import train_tokenizer
from mttrain.translations import TranslatedHypothesis
from mttrain.translator import Translator
from mttrain.tuning import (
    GRID,
    Tuning,
    advice,
    best_of,
    lowest,
    many_searches,
    one_search,
    searches,
    tune,
)
from tests.parity.ct2_help import sentences, transformer
from tests.parity.test_beam_brute_force import ContextTable, random_table, sources


def tuned(value: Callable[[float], float], present: float, metric: str = "bleu") -> Tuning:
    """With texts that are the length penalty itself, and `value` of it as their score."""
    asked: list[float] = []

    def translate(length_penalty: float) -> list[str]:
        asked.append(length_penalty)
        return [repr(length_penalty)]

    def score(texts: Sequence[str]) -> Mapping[str, float]:
        return {metric: value(float(texts[0])), "other": -value(float(texts[0]))}

    found = tune(translate, score, present, metric)
    assert len(asked) == len(set(asked)), "a value was searched twice"
    assert min(asked) >= lowest(present), "below what the lists of one search are good for"
    assert sorted(asked) == [point.length_penalty for point in found.points]
    assert [point.texts for point in found.points] == [[repr(at)] for at in sorted(asked)]
    return found


@pytest.mark.parametrize("top", [0.0, 0.1, 0.5, 0.6, 0.7, 1.3, 1.9, 2.0, 2.1, 3.3, 4.0, 5.0])
def test_top_of_a_parabola_is_found(top: float) -> None:
    """Stops a finer grid around another value than the best, and texts beside the wrong value."""
    found = tuned(lambda at: 50 - 10 * (at - top) ** 2, present=1.0)
    assert found.best.length_penalty == pytest.approx(min(top, 4), abs=1e-9)
    assert found.best.texts == [repr(found.best.length_penalty)]
    assert found.present.length_penalty == 1.0
    assert found.at_edge == (top in (0.0, 4.0, 5.0))
    assert set(GRID) <= {point.length_penalty for point in found.points}
    beyond = sum(point.length_penalty > 2 for point in found.points)
    assert len(found.points) <= len(GRID) + 2 + beyond and (beyond == 0) == (top < 2)


def test_the_metric_that_is_named_decides() -> None:
    """Stops BLEU from choosing where chrF was asked for."""
    assert tuned(lambda at: at, 1.0, "chrf").best.length_penalty == 4.0
    assert tuned(lambda at: -at, 1.0, "chrf").best.length_penalty == 0.0


@pytest.mark.parametrize("present", [0.0, 0.6, 0.67, 1.0, 2.0, -0.5, 3.0, 5.0])
def test_equal_scores_keep_the_present_value(present: float) -> None:
    """Stops a value from being recommended that is no better, digits aside that nobody sees; the
    present one is always tried, wherever it lies."""
    found = tuned(lambda at: 40 + at * 1e-3, present)
    assert found.best is found.present and found.best.length_penalty == present
    assert not found.at_edge


def test_of_equal_values_the_closest_wins() -> None:
    """All but those around the present value score the same: the nearest of them, and of two as
    near the lower."""
    found = tuned(lambda at: 30.0 if 0.55 < at < 1.05 else 40.0, present=0.8)
    assert found.best.length_penalty == 0.5  # 1.1 is as far away
    found = tuned(lambda at: 40.0 if at > 1.05 else 30.0, present=1.0)
    assert found.best.length_penalty == 1.1


# ---- one search for all values ------------------------------------------------------------------

PENALTIES = [-1.0, -0.3, 0.0, 0.4, 1.0, 1.7, 2.0, 4.0]


def as_translated(found: Sequence[Hypothesis]) -> list[TranslatedHypothesis]:
    return [TranslatedHypothesis("", h.score, h.ranked, h.finished, h.tokens) for h in found]


@pytest.mark.parametrize("beam", [2, 3, 5])
@pytest.mark.parametrize("eos", [-1.0, 0.5, 2.0])
def test_one_list_holds_the_best_of_every_value(beam: int, eos: float) -> None:
    """Stops a value from getting another output than its own search gives: the list of one search
    against a search for each value, on tables where many end at once, few end, or none does."""
    limit, differ = 9, 0
    draw = random.Random(beam)
    for number in range(12):
        table = random_table(8 + number, limit, 3, sharp=draw.choice([0.3, 1.0, 2.0]), eos=eos)

        def found(nbest: int, penalty: float, table: Any = table) -> list[list[Hypothesis]]:
            options = SearchOptions(
                beam=beam, nbest=nbest, length_penalty=penalty, max_length=limit
            )
            return beam_search(ContextTable(table), sources(table), options)

        lists = [as_translated(hypotheses) for hypotheses in found(beam, PENALTIES[0])]
        for penalty in PENALTIES:
            ranking = SearchOptions(beam=beam, length_penalty=penalty)
            mine = [best_of(hypotheses, ranking) for hypotheses in lists]
            theirs = [hypotheses[0] for hypotheses in found(1, penalty)]
            assert [(h.tokens, h.finished) for h in mine] == [
                (h.tokens, h.finished) for h in theirs
            ]
            differ += [h.tokens for h in mine] != [h[0].tokens for h in lists]
    assert differ or eos > 1, "the length penalty changed nothing: a test of nothing"


def test_a_list_of_a_higher_value_would_not_do() -> None:
    """Why the list is that of the lowest value: ranked by 4, it loses what 0 needs."""
    missing = 0
    for number in range(30):
        table = random_table(8 + number, 9, 3, sharp=0.5, eos=0.5)
        options = SearchOptions(beam=2, nbest=2, length_penalty=4.0, max_length=9)
        lists = beam_search(ContextTable(table), sources(table), options)
        single = SearchOptions(beam=2, length_penalty=0.0, max_length=9)
        wanted = beam_search(ContextTable(table), sources(table), single)
        missing += sum(
            best_of(as_translated(many), single).tokens != one[0].tokens
            for many, one in zip(lists, wanted, strict=True)
        )
    assert missing > 0


@pytest.fixture(scope="module")
def translator() -> Translator:
    """A random model whose outputs end, or do not, as their sources say."""
    tokenizer = train_tokenizer(sentences(200, 20), vocab_size=300)
    meta = {"source_lang": "en", "target_lang": "de", "max_length": 64}
    return Translator(ModelBundle(transformer(tokenizer), tokenizer, tokenizer, meta, Path("x")))


LINES = [*sentences(20, 12, seed=5), "", "  "]


def options_of(translator: Translator, **settings: Any) -> TranslateOptions:
    return translator.completed(TranslateOptions(**{"beam": 4, "max_length": 15, **settings}))


@pytest.mark.parametrize("settings", [{}, {"max_length": 7}, {"min_length": 4}], ids=str)
def test_one_search_is_a_search_for_each_value(
    translator: Translator, settings: dict[str, Any]
) -> None:
    """The same through a model and to the text, blank lines and outputs cut at the limit too."""
    options = options_of(translator, length_penalty=0.7, **settings)
    once = one_search(translator, LINES, options, iter)
    each = many_searches(translator, LINES, options, iter)
    tried = (0.0, 0.4, 1.0, 2.0)
    texts = {at: once(at) for at in tried}
    assert texts == {at: each(at) for at in tried}
    assert texts[0.0] != texts[2.0]
    assert texts[1.0] == translator.translate(
        LINES, options_of(translator, length_penalty=1.0, **settings)
    )


def test_when_one_search_serves_all(translator: Translator) -> None:
    """Stops a shared list where outputs hang on the batch (bf16) or have no lists (split lines)."""
    assert searches(translator, LINES, options_of(translator), iter)[1]
    assert not searches(translator, LINES, options_of(translator, split_long=True), iter)[1]
    half = Translator(translator.bundles, precision="bf16")
    translate, once = searches(half, LINES, options_of(half), iter)
    assert not once and translate(1.0) == half.translate(LINES, options_of(half))


# ---- what it is worth ---------------------------------------------------------------------------


def compared(delta: float, p_value: float) -> Comparison:
    return Comparison("BLEU", 30.0, 30.0 + delta, p_value, (30.0, 1.0), (30.0, 1.0), "signature")


def test_advice() -> None:
    """Stops a difference that is chance from being sold as a gain."""
    peak = tuned(lambda at: 50 - 10 * (at - 1.3) ** 2, present=1.0)
    best, use = advice(peak, compared(0.4, 0.01))
    assert best == "The best length penalty is 1.3; the present one is 1."
    assert "decode.length_penalty: 1.3 " in use and "--length-penalty 1.3 " in use
    _, chance, use = advice(peak, compared(0.4, 0.2))
    assert chance.startswith("A difference of +0.40 may well be chance (p = 0.2000)")
    assert "--length-penalty 1.3 " in use
    _, edge, _ = advice(tuned(lambda at: at, present=1.0), compared(3.0, 0.01))
    assert "end of the grid" in edge
    (keep,) = advice(tuned(lambda at: 0.0, present=0.6), None)
    assert "the present length penalty 0.6: keep it" in keep
