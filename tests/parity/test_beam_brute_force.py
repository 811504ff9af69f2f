"""Beam search against enumeration of all sequences, and against a plain reference in lists.

The model is a table: the next token's log-probabilities depend on the sentence, the step and the
last two tokens, so a state that is not moved with its beam gives another answer.
"""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from mttrain.search import Hypothesis, SearchOptions, beam_search, greedy_search

BOS, EOS, FIRST = 2, 3, 4
Key = tuple[tuple[int, ...], bool]


@dataclass(frozen=True)
class Place:
    sentence: Tensor  # [R]
    before: Tensor  # [R], last token but one
    step: int


class ContextTable:
    """tables [B, T, V, V, V]: sentence, step, last token but one, last token, next token."""

    def __init__(self, tables: Tensor) -> None:
        self.tables = tables
        self.vocab_size = tables.shape[-1]
        self.rows: list[int] = []  # rows of each step so far

    def start(self, src: Tensor) -> Place:
        return Place(src[:, 0], torch.full_like(src[:, 0], BOS), 0)

    def step(self, tokens: Tensor, state: Place) -> tuple[Tensor, Place]:
        self.rows.append(len(tokens))
        log_probs = self.tables[state.sentence, state.step, state.before, tokens].clone()
        return log_probs, replace(state, before=tokens, step=state.step + 1)

    def reorder(self, state: Place, rows: Tensor, kept: Tensor | None) -> Place:
        return replace(state, sentence=state.sentence[rows], before=state.before[rows])


def random_table(sentences: int, steps: int, words: int, *, sharp: float, eos: float) -> Tensor:
    torch.manual_seed(sentences * 1000 + steps * 10 + words)
    size = FIRST + words
    logits = torch.randn(sentences, steps, size, size, size) * sharp
    logits[..., EOS] += eos
    return logits.log_softmax(-1)


def sources(table: Tensor) -> Tensor:
    return torch.arange(len(table))[:, None]


def score(table: Tensor, tokens: tuple[int, ...]) -> float:
    """Sum of the table's entries along [BOS BOS] tokens, added up in float64."""
    path = [BOS, BOS, *tokens]
    return sum(
        float(table[step, path[step], path[step + 1], path[step + 2]])
        for step in range(len(tokens))
    )


def enumerate_all(table: Tensor, limit: int, power: float) -> list[tuple[float, Key]]:
    """Every sequence that ends within `limit` tokens (EOS counted), the best first."""
    words = range(FIRST, table.shape[-1])
    found = []
    for length in range(limit):
        for tokens in itertools.product(words, repeat=length):
            found.append((score(table, (*tokens, EOS)) / (length + 1) ** power, (tokens, True)))
    return sorted(found, reverse=True)


def plain_beam(
    table: Tensor, beam: int, nbest: int, power: float, limit: int
) -> list[tuple[float, Key]]:
    """Beam search of one sentence as the rules say, in lists, without any early stop."""
    live: list[tuple[float, tuple[int, ...]]] = [(0.0, ())]
    done: list[tuple[float, Key]] = []
    for step in range(limit):
        options = []
        for total, tokens in live:
            path = [BOS, BOS, *tokens]
            for token in range(EOS, table.shape[-1]):
                value = total + float(table[step, path[-2], path[-1], token])
                options.append((value, (*tokens, token)))
        options.sort(reverse=True)
        for value, tokens in options[:beam]:
            if tokens[-1] == EOS:
                done.append((value / len(tokens) ** power, (tokens[:-1], True)))
        live = [option for option in options if option[1][-1] != EOS][:beam]
        if len(done) >= beam:
            break
    done.sort(reverse=True)
    if len(done) < nbest:
        rest = [(value / len(tokens) ** power, (tokens, False)) for value, tokens in live]
        done += sorted(rest, reverse=True)
    return done[:nbest]


def assert_same(found: list[Hypothesis], wanted: list[tuple[float, Key]]) -> None:
    assert [(h.tokens, h.finished) for h in found] == [key for _, key in wanted]
    for hypothesis, (ranked, _) in zip(found, wanted, strict=True):
        assert hypothesis.ranked == pytest.approx(ranked, abs=1e-5)


@pytest.mark.parametrize("power", [-1.0, 0.0, 0.6, 1.0, 2.0])
def test_a_beam_that_covers_everything_is_exhaustive_search(power: float) -> None:
    """S04: stops a bound that divides by the wrong length (negative penalties most of all), and a
    penalty that is not what is printed. 5 words, length 4: 156 sequences, beam 750 holds them."""
    table = random_table(6, 4, 5, sharp=1.5, eos=0.5)
    options = SearchOptions(beam=750, nbest=12, length_penalty=power, max_length=4)
    results = beam_search(ContextTable(table), sources(table), options)
    for sentence, found in enumerate(results):
        assert_same(found, enumerate_all(table[sentence], 4, power)[:12])


@pytest.mark.parametrize(("beam", "nbest"), [(1, 1), (2, 1), (3, 3), (5, 2), (8, 8)])
@pytest.mark.parametrize("power", [-1.0, 0.0, 1.0])
def test_equals_a_plain_reference(beam: int, nbest: int, power: float) -> None:
    """S04, S12: the batched search with its early stop, shrinking batch and reordered state gives
    what the rules give when one follows them by hand, one sentence at a time."""
    table = random_table(24, 9, 6, sharp=2.0, eos=0.5)
    options = SearchOptions(beam=beam, nbest=nbest, length_penalty=power, max_length=9)
    stepper = ContextTable(table)
    for sentence, found in enumerate(beam_search(stepper, sources(table), options)):
        assert_same(found, plain_beam(table[sentence], beam, nbest, power, 9))
    assert stepper.rows[-1] < max(stepper.rows)  # finished sentences have left the batch


@pytest.mark.parametrize("beam", [1, 2, 5])
def test_scores_are_the_tables_own(beam: int) -> None:
    """S10, S12: stops a score without EOS, and cached states that stay behind when beams change
    places: the printed sum is added up again from the table, for finished and cut outputs."""
    table = random_table(50, 12, 8, sharp=2.5, eos=-2.0)
    options = SearchOptions(beam=beam, nbest=beam, max_length=12)
    kinds = set()
    for sentence, found in enumerate(beam_search(ContextTable(table), sources(table), options)):
        for hypothesis in found:
            tail = (EOS,) if hypothesis.finished else ()
            wanted = score(table[sentence], (*hypothesis.tokens, *tail))
            assert hypothesis.score == pytest.approx(wanted, abs=1e-4)
            assert hypothesis.ranked == pytest.approx(
                wanted / (len(hypothesis.tokens) + len(tail)), abs=1e-4
            )
            kinds.add(hypothesis.finished)
    assert kinds == {True, False}


@pytest.mark.parametrize("power", [-1.0, 0.0, 0.6, 1.0, 2.0])
def test_beam_one_is_greedy(power: float) -> None:
    """S11: stops two code paths from treating limits, penalty or scores differently."""
    table = random_table(200, 10, 8, sharp=1.0, eos=0.0)
    options = SearchOptions(beam=1, length_penalty=power, max_length=10)
    greedy = greedy_search(ContextTable(table), sources(table), options)
    beamed = beam_search(ContextTable(table), sources(table), options)
    for one, other in zip(greedy, beamed, strict=True):
        assert [(h.tokens, h.finished) for h in one] == [(h.tokens, h.finished) for h in other]
        assert one[0].score == pytest.approx(other[0].score, abs=1e-5)
        assert one[0].ranked == pytest.approx(other[0].ranked, abs=1e-5)
    assert {found[0].finished for found in greedy} == {True, False}


@pytest.mark.parametrize(
    "rules",
    [
        {"min_length": 4},
        {"no_repeat_ngram": 2},
        {"no_repeat_ngram": 1, "min_length": 3},
        {"forbidden": (0, 1, 2, 5, 7)},
    ],
    ids=str,
)
@pytest.mark.parametrize("limit", [None, 6])
@pytest.mark.parametrize("forced", [False, True])
def test_beam_one_is_greedy_under_every_rule(
    rules: dict[str, Any], limit: int | None, forced: bool
) -> None:
    """S11: minimum length, blocked n-grams, forbidden tokens, forced prefixes of several lengths
    and the hard limit of learned positions are rules of both code paths."""
    table = random_table(100, 10, 8, sharp=1.0, eos=0.5)
    chooser = random.Random(2)
    prefixes = [chooser.choices(range(FIRST, FIRST + 8), k=i % 4) for i in range(100)]
    options = SearchOptions(beam=1, max_length=9, **rules)
    more: dict[str, Any] = {"limit": limit, "prefixes": prefixes if forced else None}
    greedy = greedy_search(ContextTable(table), sources(table), options, **more)
    beamed = beam_search(ContextTable(table), sources(table), options, **more)
    for place, (one, other) in enumerate(zip(greedy, beamed, strict=True)):
        assert [(h.tokens, h.finished) for h in one] == [(h.tokens, h.finished) for h in other]
        assert one[0].score == pytest.approx(other[0].score, abs=1e-5)
        assert one[0].ranked == pytest.approx(other[0].ranked, abs=1e-5)
        if forced:
            assert list(one[0].tokens[: place % 4]) == prefixes[place]
    assert any(found[0].finished for found in greedy)
    assert max(len(found[0].tokens) for found in greedy) <= (limit or 9)


def test_a_larger_penalty_gives_longer_output() -> None:
    """S04: the sign. Mean length over 200 sentences rises with A, as the help text says."""
    table = random_table(200, 12, 6, sharp=1.0, eos=0.5)
    means = []
    for power in (-1.0, 0.0, 0.6, 1.0, 2.0):
        options = SearchOptions(beam=5, length_penalty=power, max_length=12)
        results = beam_search(ContextTable(table), sources(table), options)
        means.append(sum(len(found[0].tokens) for found in results) / 200)
    assert means == sorted(means) and means[0] + 0.5 < means[-1]


def test_penalty_zero_is_the_plain_sum() -> None:
    """S04: A = 0 prints the sum itself as the ranked score."""
    table = random_table(20, 6, 5, sharp=1.5, eos=0.5)
    options = SearchOptions(beam=4, nbest=4, length_penalty=0.0, max_length=6)
    for found in beam_search(ContextTable(table), sources(table), options):
        assert [h.ranked for h in found] == [h.score for h in found]


@pytest.mark.parametrize("beam", [1, 4])
def test_neighbours_do_not_matter(beam: int) -> None:
    """S07, S12: stops a finished sentence from disturbing the ones that go on: a batch of 40
    gives what 40 batches of one give, in any order."""
    table = random_table(40, 10, 7, sharp=1.5, eos=0.0)
    options = SearchOptions(beam=beam, nbest=beam, max_length=10)
    order = torch.randperm(40)
    together = beam_search(ContextTable(table), sources(table)[order], options)
    for place, sentence in enumerate(order.tolist()):
        alone = beam_search(ContextTable(table), torch.tensor([[sentence]]), options)[0]
        assert_same(together[place], [(h.ranked, (h.tokens, h.finished)) for h in alone])


def test_forced_prefix_is_exhaustive_search_below_it() -> None:
    """A prefix that every output starts with: the best of all sequences that begin so, with the
    prefix's own log-probabilities in the score; prefixes of several lengths in one batch."""
    table = random_table(4, 4, 4, sharp=1.5, eos=0.5)
    prefixes = [[], [5], [6, 4], [7, 7, 7]]
    options = SearchOptions(beam=400, nbest=3, max_length=4)
    results = beam_search(ContextTable(table), sources(table), options, prefixes=prefixes)
    for sentence, (found, prefix) in enumerate(zip(results, prefixes, strict=True)):
        everything = enumerate_all(table[sentence], 4, 1.0)
        wanted = [item for item in everything if item[1][0][: len(prefix)] == tuple(prefix)]
        finished = [h for h in found if h.finished]
        assert_same(finished, wanted[:3])
        assert all(h.tokens[: len(prefix)] == tuple(prefix) for h in found)


def test_blocked_ngrams_are_exhaustive_search_without_them() -> None:
    """no_repeat_ngram: the best of all sequences in which no pair of tokens occurs twice."""
    table = random_table(5, 5, 3, sharp=2.0, eos=-1.0)
    options = SearchOptions(beam=500, nbest=5, max_length=5, no_repeat_ngram=2)
    for sentence, found in enumerate(beam_search(ContextTable(table), sources(table), options)):
        wanted = [
            item
            for item in enumerate_all(table[sentence], 5, 1.0)
            if len(set(itertools.pairwise(item[1][0]))) == max(len(item[1][0]) - 1, 0)
        ]
        assert_same(found, wanted[:5])


def test_minimum_length_is_exhaustive_search_above_it() -> None:
    """S03: with a minimum length the best output that is not shorter, scores unchanged."""
    table = random_table(5, 5, 3, sharp=1.0, eos=2.0)
    for least in (0, 1, 3):
        options = SearchOptions(beam=500, nbest=4, max_length=5, min_length=least)
        results = beam_search(ContextTable(table), sources(table), options)
        for sentence, found in enumerate(results):
            everything = enumerate_all(table[sentence], 5, 1.0)
            assert_same(found, [item for item in everything if len(item[1][0]) >= least][:4])


def test_early_stop_is_sound() -> None:
    """S04: stopping when nothing alive can win saves steps under A = 0 and changes nothing."""
    table = random_table(30, 20, 6, sharp=3.0, eos=1.0)
    options = SearchOptions(beam=6, length_penalty=0.0, max_length=20)
    stepper = ContextTable(table)
    for sentence, found in enumerate(beam_search(stepper, sources(table), options)):
        assert_same(found, plain_beam(table[sentence], 6, 1, 0.0, 20))
    full = ContextTable(table)
    beam_search(full, sources(table), replace(options, nbest=6))
    assert sum(stepper.rows) < sum(full.rows)
