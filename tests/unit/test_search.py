"""Search at its edges: nothing can end, everything ends, too little is allowed, sampling."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import Tensor

from mttrain.search import (
    EnsembleStepper,
    Hypothesis,
    SearchOptions,
    beam_search,
    greedy_search,
    sample_search,
    search,
)

PAD, UNK, BOS, EOS, A, B, C = range(7)
NEVER = -math.inf


class Markov:
    """The next token depends on the sentence and the last token: tables [B, V, V]."""

    def __init__(self, tables: Tensor) -> None:
        self.tables, self.vocab_size = tables, tables.shape[-1]
        self.rows: list[int] = []  # rows of each step so far

    def start(self, src: Tensor) -> Tensor:
        return src[:, 0]

    def step(self, tokens: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        self.rows.append(len(tokens))
        return self.tables[state, tokens].clone(), state

    def reorder(self, state: Tensor, rows: Tensor, kept: Tensor | None) -> Tensor:
        return state[rows]


def chain(words: int = 3, sentences: int = 1, seed: int = 1, eos: float = 0.0) -> Tensor:
    torch.manual_seed(seed)
    logits = torch.randn(sentences, 4 + words, 4 + words)
    logits[..., EOS] += eos
    return logits.log_softmax(-1)


def chain_with(**entries: dict[str, float]) -> Tensor:
    """A table in which only the named steps are possible: chain_with(BOS={"A": 0.5, "EOS": 0.5})"""
    table = torch.full((1, 7, 7), NEVER)
    for last, following in entries.items():
        for token, probability in following.items():
            table[0, globals()[last], globals()[token]] = math.log(probability)
    return table


def run(tables: Tensor, count: int | None = None, **settings: object) -> list[list[Hypothesis]]:
    """Search all sentences of the tables (or the first `count`) in one batch, 5 source words."""
    src = torch.arange(len(tables) if count is None else count)[:, None]
    options = SearchOptions(**settings)  # type: ignore[arg-type]
    return search(Markov(tables), src, options, lengths=[5] * len(src))


def log(*probabilities: float) -> float:
    return sum(math.log(p) for p in probabilities)


@pytest.mark.parametrize("beam", [1, 4])
def test_without_eos_the_limit_ends_it(beam: int) -> None:
    """S01: a model that never ends stops at 3 x source + 20 tokens, marked as cut; a neighbour
    that ends is not touched."""
    tables = chain(sentences=2, eos=1.0)
    tables[0, :, EOS] = NEVER
    endless, other = run(tables, beam=beam)
    assert len(endless[0].tokens) == 3 * 5 + 20
    assert not endless[0].finished and math.isfinite(endless[0].ranked)
    [alone] = run(tables[1:], beam=beam)
    assert other[0].tokens == alone[0].tokens and other[0].finished


def test_the_batch_shrinks() -> None:
    """S01: when one of 10 sentences never ends, the others stop costing anything."""
    tables = chain(sentences=10, eos=20.0)
    tables[3, :, EOS] = NEVER
    for beam in (1, 3):
        stepper = Markov(tables)
        options = SearchOptions(beam=beam, max_length=30)
        src = torch.arange(10)[:, None]
        search(stepper, src, options, lengths=[5] * 10)
        assert stepper.rows[0] == 10 and stepper.rows[-1] == beam and len(stepper.rows) == 30
        assert sum(stepper.rows) <= 10 + 10 * beam + 30 * beam


@pytest.mark.parametrize(("beam", "nbest"), [(1, 1), (4, 1), (4, 4)])
def test_everything_ends_at_once(beam: int, nbest: int) -> None:
    """S02: EOS with probability 1 at step 1: an empty output with score 0, alone and beside a
    normal sentence."""
    tables = chain(sentences=2)
    tables[0] = NEVER
    tables[0, :, EOS] = 0.0
    for count in (1, 2):
        found = run(tables, count, beam=beam, nbest=nbest)[0]
        assert found == [Hypothesis((), 0.0, 0.0, True)]


def test_length_counts_eos() -> None:
    """S03: the empty output is divided by 1^A, not by 0; A decides between it and a longer one."""
    table = chain_with(BOS={"EOS": 0.3, "A": 0.7}, A={"A": 0.1, "EOS": 0.9})
    plain = run(table, beam=5, nbest=2, length_penalty=0.0)[0]
    assert [h.tokens for h in plain] == [(A,), ()]
    assert plain[0].score == pytest.approx(log(0.7, 0.9))
    normalised = run(table, beam=5, nbest=5, length_penalty=1.0)[0]
    assert normalised[0].tokens == (A,)
    assert normalised[0].ranked == pytest.approx(log(0.7, 0.9) / 2)
    assert next(h for h in normalised if not h.tokens).ranked == pytest.approx(log(0.3))


@pytest.mark.parametrize(("words", "beam"), [(4, 20), (1, 20), (2, 3)])
def test_beam_larger_than_the_vocabulary(words: int, beam: int) -> None:
    """S05: fewer than 2K continuations at the first step; no control token fills the beam."""
    for found in run(chain(words, sentences=3), beam=beam, nbest=beam, max_length=6):
        assert found
        assert all(token > EOS for h in found for token in h.tokens)
        assert all(math.isfinite(h.score) for h in found)


def test_fewer_outputs_than_asked() -> None:
    """S06: a sentence with 2 possible outputs gives 2, not fillers; the prefix of one of them is
    no third."""
    table = chain_with(BOS={"A": 0.6, "B": 0.4}, A={"EOS": 1.0}, B={"EOS": 1.0})
    found = run(table, beam=5, nbest=5)[0]
    assert [(h.tokens, h.finished) for h in found] == [((A,), True), ((B,), True)]
    assert [h.score for h in found] == pytest.approx([log(0.6), log(0.4)])


def test_unfinished_ones_fill_up_at_the_limit() -> None:
    """S06: the limit comes before enough have finished: cut outputs follow, whatever their rank."""
    table = chain_with(BOS={"A": 0.9, "EOS": 0.1}, A={"A": 0.9, "B": 0.1}, B={"B": 1.0})
    found = run(table, beam=3, nbest=3, max_length=2)[0]
    assert [(h.tokens, h.finished) for h in found] == [((), True), ((A, A), False), ((A, B), False)]
    assert found[1].score == pytest.approx(log(0.9, 0.9))
    assert found[1].ranked == pytest.approx(log(0.9, 0.9) / 2)
    only = run(table, beam=2, nbest=1, max_length=2)[0]
    assert [(h.tokens, h.finished) for h in only] == [((), True)]


@pytest.mark.parametrize("beam", [1, 3])
def test_nothing_may_follow(beam: int) -> None:
    """S06, S19: a dead end gives what stands before it, with a finite score and marked as cut; at
    the very first step that is nothing."""
    table = chain_with(BOS={"A": 0.5, "B": 0.2}, A={"UNK": 1.0}, B={"PAD": 1.0})
    [found] = run(table, beam=beam)
    assert (found[0].tokens, found[0].finished) == ((A,), False)
    assert found[0].score == pytest.approx(log(0.5))
    [found] = run(chain_with(BOS={"PAD": 1.0}), beam=beam)
    assert found == [Hypothesis((), 0.0, 0.0, False)]


@pytest.mark.parametrize("sample", [False, True])
@pytest.mark.parametrize("beam", [1, 3])
def test_not_a_number_is_never_printed(beam: int, sample: bool) -> None:
    """S19: a model whose softmax overflows gives NaN: that sentence is cut there, finite score,
    and its neighbour is untouched."""
    tables = chain(sentences=2, eos=0.5)
    good = run(tables[1:].clone(), beam=beam)[0]
    tables[0] = math.nan
    broken, other = run(tables, beam=beam, sample=sample)
    assert broken == [Hypothesis((), 0.0, 0.0, False)]
    if not sample:
        assert other == good


@pytest.mark.parametrize("beam", [1, 5])
def test_forbidden_tokens_are_masked_without_renormalising(beam: int) -> None:
    """S19, S20: control tokens are the model's favourites here and never come out; the scores of
    the others stay the table's own."""
    tables = chain(words=6, sentences=200)
    tables[:, :, :3] += 5.0
    tables = tables.log_softmax(-1)
    for sentence, found in enumerate(run(tables, beam=beam, nbest=beam, max_length=8)):
        for h in found:
            assert not {PAD, UNK, BOS, EOS} & set(h.tokens)
            path = [BOS, *h.tokens, *([EOS] if h.finished else [])]
            own = sum(float(tables[sentence, a, b]) for a, b in itertools.pairwise(path))
            assert h.score == pytest.approx(own, abs=1e-4)


def test_few_allowed_tokens_and_ngram_blocking() -> None:
    """S19: vocabulary 10, beam 5, and so many tokens blocked that fewer than 5 may follow: scores
    stay finite, nothing blocked comes out."""
    tables = chain(words=6, sentences=20, eos=-4.0)
    found = run(
        tables, beam=5, nbest=5, no_repeat_ngram=1, forbidden=(0, 1, 2, 4, 5), max_length=40
    )
    for hypotheses in found:
        assert hypotheses
        for h in hypotheses:
            assert math.isfinite(h.score) and math.isfinite(h.ranked)
            assert len(set(h.tokens)) == len(h.tokens) <= 4
            assert set(h.tokens) <= {6, 7, 8, 9}


@pytest.mark.parametrize("beam", [2, 10])
def test_nbest_holds_no_duplicates(beam: int) -> None:
    """S21: beams that all start equal, or a last token dropped as if it were EOS, would give the
    same sequence twice."""
    for found in run(chain(words=5, sentences=30), beam=beam, nbest=beam, max_length=7):
        assert len({(h.tokens, h.finished) for h in found}) == len(found) == beam
        assert all(len(h.tokens) == 7 for h in found if not h.finished)
        ranked = [h.ranked for h in found if h.finished]
        assert ranked == sorted(ranked, reverse=True)


def test_limits() -> None:
    """S14: the default limit grows with the source; an explicit one, and the hard one of learned
    positions, count EOS; a forced prefix always fits with EOS."""
    tables = chain(sentences=3)
    tables[:, :, EOS] = NEVER
    src = torch.arange(3)[:, None]

    def lengths(limit: int | None = None, **settings: object) -> list[int]:
        options = SearchOptions(beam=2, **settings)  # type: ignore[arg-type]
        found = beam_search(Markov(tables), src, options, lengths=[1, 40, 400], limit=limit)
        return [len(f[0].tokens) for f in found]

    assert lengths() == [23, 140, 1220]
    assert lengths(limit=64) == [23, 64, 64]
    assert lengths(max_length=7) == [7, 7, 7]
    assert lengths(min_length=100) == [101, 140, 1220]
    prefixes = [[A] * 9, [], []]
    options = SearchOptions(beam=2, max_length=5)
    found = beam_search(Markov(tables), src, options, lengths=[1] * 3, prefixes=prefixes)
    assert [len(f[0].tokens) for f in found] == [10, 5, 5]


def test_source_lengths_are_counted_without_padding_and_eos() -> None:
    """S14: in a padded batch each sentence has its own limit, not that of the longest."""
    table = chain(words=20)
    table[:, :, EOS] = NEVER
    src = torch.tensor([[5, 6, EOS, PAD, PAD], [5, 6, 7, 8, EOS]])
    stepper = Markov(table.expand(9, -1, -1))
    for beam in (1, 2):
        found = search(stepper, src, SearchOptions(beam=beam))
        assert [len(f[0].tokens) for f in found] == [26, 32]


@pytest.mark.parametrize("beam", [1, 3])
def test_prefix_that_the_model_would_never_write(beam: int) -> None:
    """A forced prefix is kept though the model finds it unlikely or it holds a forbidden token;
    afterwards the search is free, but not to forbidden tokens."""
    tables = chain(words=4, sentences=2)
    options = SearchOptions(beam=beam, max_length=8)
    src = torch.arange(2)[:, None]
    found = search(Markov(tables), src, options, lengths=[3, 3], prefixes=[[UNK, 5], []])
    tokens = found[0][0].tokens
    assert tokens[:2] == (UNK, 5) and not {PAD, UNK, BOS} & set(tokens[2:])
    free = search(Markov(tables), src[1:], options, lengths=[3])
    assert found[1][0].tokens == free[0][0].tokens


def test_ensemble_averages_probabilities() -> None:
    """A mean of log-probabilities (a product) would be another model: the numbers tell."""
    first = chain_with(BOS={"A": 0.9, "B": 0.1}, A={"EOS": 1.0}, B={"EOS": 1.0})
    second = chain_with(BOS={"A": 0.2, "B": 0.8}, A={"EOS": 0.5, "C": 0.5}, B={"EOS": 1.0})
    both = EnsembleStepper([Markov(first), Markov(second)])
    options = SearchOptions(beam=4, nbest=2, length_penalty=0.0, max_length=2)
    [found] = beam_search(both, torch.zeros(1, 1, dtype=torch.int64), options)
    assert [h.tokens for h in found] == [(B,), (A,)]
    assert found[0].score == pytest.approx(log(0.45))
    assert found[1].score == pytest.approx(log(0.55, 0.75))


def test_ensemble_of_one_model_twice_is_that_model() -> None:
    tables = chain(words=6, sentences=10)
    options, src = SearchOptions(beam=4, max_length=9), torch.arange(10)[:, None]
    twice = beam_search(EnsembleStepper([Markov(tables), Markov(tables)]), src, options)
    for one, two in zip(beam_search(Markov(tables), src, options), twice, strict=True):
        assert one[0].tokens == two[0].tokens
        assert one[0].score == pytest.approx(two[0].score, abs=1e-4)


def test_ensemble_of_unequal_vocabularies() -> None:
    with pytest.raises(ValueError, match="vocabulary"):
        EnsembleStepper([Markov(chain(3)), Markov(chain(4))])


# --- sampling ---------------------------------------------------------------------------------


def sampled(tables: Tensor, lines: list[int], **settings: object) -> list[list[Hypothesis]]:
    options = SearchOptions(sample=True, **settings)  # type: ignore[arg-type]
    src = torch.tensor(lines)[:, None] % len(tables)
    return sample_search(Markov(tables), src, options, line_ids=lines, lengths=[5] * len(lines))


def test_draws_do_not_depend_on_the_batch() -> None:
    """Stops a shared generator: a line drawn alone, in another order or beside other lines gives
    the same texts; another seed, line or draw gives others."""
    tables, lines = chain(words=20, sentences=1), [3, 1, 8, 2, 17]
    together = sampled(tables, lines, nbest=3, seed=5)
    for line, found in zip(lines, together, strict=True):
        assert sampled(tables, [line], nbest=3, seed=5) == [found]
        assert sampled(tables, [line], seed=5)[0] == found[:1]
    texts = {h.tokens for found in together for h in found}
    assert len(texts) > 10
    assert sampled(tables, lines, nbest=3, seed=6) != together


def test_draws_follow_the_distribution() -> None:
    """20,000 draws of the first token against its probabilities (within 4 standard errors);
    forbidden tokens get nothing, temperature 2 flattens."""
    table = torch.tensor([[0.1, 0.1, 0.1, 0.1, 0.3, 0.2, 0.1]]).log().expand(1, 7, 7)
    for heat in (1.0, 2.0):
        weights = (table[0, 0] / heat).exp()
        weights[:3] = 0
        weights /= weights.sum()
        found = sampled(table, list(range(20_000)), max_length=1, temperature=heat)
        first = [h.tokens[0] if h.tokens else EOS for [h] in found]
        for token in range(7):
            p = float(weights[token])
            error = 4 * math.sqrt(p * (1 - p) / 20_000)
            assert first.count(token) / 20_000 == pytest.approx(p, abs=error + 1e-9)


def test_sampled_scores_are_the_models_own() -> None:
    """S10 for sampling: temperature and cuts shape the draw, not the printed score."""
    tables = chain(words=8, sentences=5)
    found = sampled(tables, list(range(5)), nbest=4, temperature=3.0, top_k=5, max_length=9)
    for sentence, hypotheses in enumerate(found):
        assert len(hypotheses) == 4
        for h in hypotheses:
            path = [BOS, *h.tokens, *([EOS] if h.finished else [])]
            own = sum(float(tables[sentence, a, b]) for a, b in itertools.pairwise(path))
            assert h.score == pytest.approx(own, abs=1e-4)


def test_top_one_is_greedy() -> None:
    """top_k 1, and a top_p below the largest probability, leave only the best token."""
    tables, lines = chain(words=8, sentences=6), list(range(6))
    greedy = greedy_search(
        Markov(tables), torch.arange(6)[:, None], SearchOptions(beam=1), lengths=[5] * 6
    )
    assert sampled(tables, lines, top_k=1) == greedy
    assert sampled(tables, lines, top_p=1e-6) == greedy
    assert sampled(tables, lines, temperature=1e-4) == greedy
