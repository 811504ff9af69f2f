"""Greedy search, beam search and sampling over a step function; n-best lists with honest scores.

The search never sees a model: a `Stepper` gives the log-probabilities of the next token, so the
search is held against brute force on hand-made tables, and an ensemble is one more stepper.

Rules. Per step the best 2K of all continuations are looked at; one that ends with EOS and stands
among the best K is finished, the K best others go on. A sentence is done when K hypotheses are
finished, when nothing alive can still enter its n-best list, or at its length limit; it leaves the
batch together with others. Hypotheses are ranked by (sum of log-probabilities, EOS included) /
length^A, where length counts EOS (A = 0: the plain sum; A = 1: the mean; larger A favours longer
output). Forbidden tokens are masked after the softmax and nothing is renormalised, so a score is
always the model's own log-probability of the tokens shown.

Price: one model step on b x K rows per token, one transfer to the host per step, and one pass over
the [b, K*V] scores to find the best. Greedy search and sampling never reorder the state, except
to drop finished rows.

Shapes: B sentences of the input, b sentences still in the batch, K beam, W rows per sentence
(1 or K), R = b x W rows, C candidates per sentence, V vocabulary, S source length, t tokens so far.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from mttrain.searchstep import (
    NEVER,
    Hypothesis,
    Rules,
    SearchOptions,
    draw,
    row_keys,
    top_scores,
    uniform,
)

__all__ = [
    "EnsembleStepper",
    "Hypothesis",
    "SearchOptions",
    "Stepper",
    "beam_search",
    "greedy_search",
    "sample_search",
    "search",
]

State = TypeVar("State")
_COMPACT = 8  # dropping rows copies the state, so it waits until 1/8 of the batch is done


class Stepper(Protocol[State]):
    """What the search asks of a model: next-token log-probabilities and a state it can reorder.

    After `start` the state has one row per source sentence. `step` returns a float32 tensor that
    the search overwrites before it calls again. `reorder` gives the state whose row i is the old
    row rows[i]; rows may repeat, rows of one sentence are always neighbours, and all sentences have
    equally many. kept: which of the old sentences are left, in their order (None: all); to split
    the rows of a sentence into sentences of their own it names that sentence several times.
    """

    @property
    def vocab_size(self) -> int: ...

    def start(self, src: Tensor) -> State: ...

    def step(self, tokens: Tensor, state: State) -> tuple[Tensor, State]: ...

    def reorder(self, state: State, rows: Tensor, kept: Tensor | None) -> State: ...


class EnsembleStepper:
    """Several steppers as one: the mean of their probabilities (log-mean-exp)."""

    def __init__(self, steppers: Sequence[Stepper[Any]]) -> None:
        sizes = {stepper.vocab_size for stepper in steppers}
        if len(sizes) != 1:
            raise ValueError(f"an ensemble needs equal vocabulary sizes, not {sorted(sizes)}")
        self.steppers = tuple(steppers)
        self.vocab_size = sizes.pop()

    def start(self, src: Tensor) -> list[Any]:
        """src [B, S] -> the states of all members"""
        return [stepper.start(src) for stepper in self.steppers]

    def step(self, tokens: Tensor, state: list[Any]) -> tuple[Tensor, list[Any]]:
        """tokens [R] -> log of the mean probability [R, V], and the new states"""
        outs = [s.step(tokens, part) for s, part in zip(self.steppers, state, strict=True)]
        total = torch.stack([log_probs for log_probs, _ in outs]).logsumexp(0)
        return total.sub_(math.log(len(outs))), [part for _, part in outs]

    def reorder(self, state: list[Any], rows: Tensor, kept: Tensor | None) -> list[Any]:
        """The states of all members with rows [R] of the old ones."""
        return [s.reorder(part, rows, kept) for s, part in zip(self.steppers, state, strict=True)]


def search(
    stepper: Stepper[Any],
    src: Tensor,
    options: SearchOptions,
    *,
    lengths: Sequence[int] | None = None,
    prefixes: Sequence[Sequence[int]] | None = None,
    limit: int | None = None,
    line_ids: Sequence[int] | None = None,
) -> list[list[Hypothesis]]:
    """Translate src [B, S] as the options say: sampling, greedy (beam 1) or beam search.

    lengths: source subwords without EOS, default: counted in src; prefixes: forced first target
    tokens of each sentence; limit: no output is longer than this (tokens, EOS included), whatever
    the options say; line_ids: what keys the draws, default: the row numbers. Returns for each
    sentence 1 to nbest hypotheses, the best first (drawn ones in the order of drawing).
    """
    if options.sample:
        ids = range(src.shape[0]) if line_ids is None else line_ids
        return sample_search(
            stepper, src, options, line_ids=ids, lengths=lengths, prefixes=prefixes, limit=limit
        )
    find = greedy_search if options.beam == 1 else beam_search
    return find(stepper, src, options, lengths=lengths, prefixes=prefixes, limit=limit)


def _best_first(options: SearchOptions, found: list[Hypothesis]) -> list[Hypothesis]:
    """Finished before unfinished, then by ranked score; equal ones in the order they came."""
    return sorted(found, key=lambda h: (not h.finished, -h.ranked))[: options.nbest]


# ---- beam search ------------------------------------------------------------------------------


def beam_search(
    stepper: Stepper[Any],
    src: Tensor,
    options: SearchOptions,
    *,
    lengths: Sequence[int] | None = None,
    prefixes: Sequence[Sequence[int]] | None = None,
    limit: int | None = None,
) -> list[list[Hypothesis]]:
    """The nbest hypotheses of each sentence of src [B, S] by beam search; arguments as `search`.

    When fewer than nbest hypotheses finish, unfinished beams follow them; their token sequences
    are all distinct, and there is always at least one.
    """
    rules = Rules(options, src, stepper.vocab_size, lengths, prefixes, limit)
    beams = _Beams(options, rules, src)
    state = stepper.start(src)
    tokens = src.new_full((src.shape[0],), options.bos)
    while beams.sentences:
        log_probs, state = stepper.step(tokens, state)
        tokens, rows, kept = beams.advance(log_probs)
        if rows is not None:
            state = stepper.reorder(state, rows, kept)
    return [_best_first(options, found) for found in beams.found]


class _Beams:
    """The live hypotheses of a batch, and the finished ones of every sentence."""

    def __init__(self, options: SearchOptions, rules: Rules, src: Tensor) -> None:
        count = src.shape[0]
        self.options, self.rules = options, rules
        self.found: list[list[Hypothesis]] = [[] for _ in range(count)]
        # Input sentence of each group of W rows; None: done, to be dropped with the next ones.
        self.sentences: list[int | None] = list(range(count))
        self.tokens = src.new_empty((count, 0))  # [R, t]
        self.scores = torch.zeros(count, 1, device=src.device)  # [b, W], sums of log-probabilities

    def advance(self, log_probs: Tensor) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Take the log-probabilities [R, V] of one step (overwritten).

        Returns the last tokens of the new rows, which rows of the state they are (None: as they
        were), and which of its sentences are left (None: all).
        """
        beam, vocab = self.options.beam, log_probs.shape[1]
        groups, width = self.scores.shape
        self.rules.mask(log_probs, self.tokens, width)
        total = log_probs.view(groups, width, vocab).add_(self.scores[:, :, None])
        score, index = top_scores(total.view(groups, -1), 2 * beam)  # [b, C], best first
        base = torch.arange(0, groups * width, width, device=score.device)[:, None]
        parent, token = base + index.div(vocab, rounding_mode="floor"), index % vocab  # [b, C]

        ends = token == self.options.eos
        ended = score.masked_fill(~ends, NEVER)[:, :beam]
        # While all sentences follow their prefixes, each has one live hypothesis.
        step = self.tokens.shape[1]
        next_width = 1 if step < self.rules.shortest else min(beam, score.shape[1])
        live, order = score.masked_fill(ends, NEVER).topk(next_width)  # [b, W]
        rows, last = parent.gather(1, order), token.gather(1, order)  # [b, W]

        report = torch.cat([ended, live[:, :1]], 1).tolist()
        self._harvest(report, score, parent, live, rows, last)
        kept = [group for group, sentence in enumerate(self.sentences) if sentence is not None]
        keep = None
        if _COMPACT * (groups - len(kept)) >= groups:
            keep = torch.tensor(kept, dtype=torch.int64, device=score.device)
            rows, last, live = rows[keep], last[keep], live[keep]
            self.sentences = [self.sentences[group] for group in kept]
            self.rules.keep(keep)
        flat, ids = rows.reshape(-1), last.reshape(-1)
        self.scores = live
        self.tokens = torch.cat([self.tokens.index_select(0, flat), ids[:, None]], 1)
        same = width == next_width == 1 and keep is None
        return ids, (None if same or not kept else flat), keep

    def _harvest(
        self,
        report: list[list[float]],
        score: Tensor,
        parent: Tensor,
        live: Tensor,
        rows: Tensor,
        last: Tensor,
    ) -> None:
        """Store what has finished; a sentence that is done leaves its group.

        report: for each group the scores of what ends among the best K, others at -inf, and the
        score of the best that goes on. NaN, from a model that overflows, counts as -inf.
        """
        here = [(group, at) for group, at in enumerate(self.sentences) if at is not None]
        hits = [
            (group, i, self.found[at])
            for group, at in here
            for i, value in enumerate(report[group][:-1])
            if value > NEVER
        ]
        if hits:
            groups, columns, lists = zip(*hits, strict=True)
            self._add(lists, parent[groups, columns], score[groups, columns], finished=True)
        for group, sentence in here:
            best = report[group][-1]
            if not self._done(sentence, best):
                continue
            self.sentences[group], found = None, self.found[sentence]
            if len(found) < self.options.nbest and best > NEVER:  # stopped by its limit
                alive = live[group] > NEVER
                ids = last[group][alive]
                self._add([found] * len(ids), rows[group][alive], live[group][alive], False, ids)
            elif not found:  # nothing may follow what stood before this step
                width = self.scores.shape[1]
                before = torch.arange(width, device=live.device) + group * width
                alive = self.scores[group] > NEVER
                scores = self.scores[group][alive]
                self._add([found] * len(scores), before[alive], scores, False)

    def _done(self, sentence: int, best: float) -> bool:
        """Whether a sentence, whose best live sum is `best`, needs no further step.

        Further tokens only lower a sum, so the most that a live sum can rank is itself divided by
        the longest possible length (A > 0) or by the shortest (A < 0).
        """
        found, length = self.found[sentence], self.tokens.shape[1] + 1
        limit, options = self.rules.limits[sentence], self.options
        if length >= limit or len(found) >= options.beam or not best > NEVER:
            return True
        if len(found) < options.nbest:
            return False
        reach = limit if options.length_penalty > 0 else length + 1
        bound = options.ranked(best, reach, finished=False)
        return sum(hypothesis.ranked >= bound for hypothesis in found) >= options.nbest

    def _add(
        self,
        lists: Sequence[list[Hypothesis]],
        rows: Tensor,
        scores: Tensor,
        finished: bool,
        last: Tensor | None = None,
    ) -> None:
        """To each of the lists a hypothesis: the tokens of its row, then, if given, its last."""
        tokens = self.tokens[rows]
        if last is not None:
            tokens = torch.cat([tokens, last[:, None]], 1)
        for found, ids, score in zip(lists, tokens.tolist(), scores.tolist(), strict=True):
            ranked = self.options.ranked(score, len(ids), finished)
            found.append(Hypothesis(tuple(ids), score, ranked, finished))


# ---- one hypothesis per row: greedy search and sampling -----------------------------------------

# (log-probabilities [R, V], numbers of the rows [R], step) -> their value and token, both [R]
Choose = Callable[[Tensor, list[int], int], tuple[Tensor, Tensor]]


def greedy_search(
    stepper: Stepper[Any],
    src: Tensor,
    options: SearchOptions,
    *,
    lengths: Sequence[int] | None = None,
    prefixes: Sequence[Sequence[int]] | None = None,
    limit: int | None = None,
) -> list[list[Hypothesis]]:
    """The most probable token at each step; gives what `beam_search` gives with beam 1."""
    rules = Rules(options, src, stepper.vocab_size, lengths, prefixes, limit)

    def choose(log_probs: Tensor, rows: list[int], step: int) -> tuple[Tensor, Tensor]:
        value, token = top_scores(log_probs, 1)
        return value[:, 0], token[:, 0]

    return [[found] for found in _single_paths(stepper, src, rules, choose)]


def sample_search(
    stepper: Stepper[Any],
    src: Tensor,
    options: SearchOptions,
    *,
    line_ids: Sequence[int],
    lengths: Sequence[int] | None = None,
    prefixes: Sequence[Sequence[int]] | None = None,
    limit: int | None = None,
) -> list[list[Hypothesis]]:
    """nbest independent draws for each sentence, in the order of drawing; they may be equal.

    The number behind a draw depends on (seed, line id, draw, step) alone, so a text does not
    change with its neighbours in the batch. Tokens are drawn among the allowed ones; the score
    stays the model's own log-probability, without temperature.
    """
    rules = Rules(options, src, stepper.vocab_size, lengths, prefixes, limit)
    keys = row_keys(options.seed, line_ids, options.nbest)

    def choose(log_probs: Tensor, rows: list[int], step: int) -> tuple[Tensor, Tensor]:
        noise = torch.from_numpy(uniform(keys[rows], step)).to(log_probs.device)
        token = draw(log_probs, noise, options.temperature, options.top_k, options.top_p)
        return log_probs.gather(1, token[:, None])[:, 0], token

    found = _single_paths(stepper, src, rules, choose, options.nbest)
    return [found[at : at + options.nbest] for at in range(0, len(found), options.nbest)]


def _single_paths(
    stepper: Stepper[Any], src: Tensor, rules: Rules, choose: Choose, copies: int = 1
) -> list[Hypothesis]:
    """One hypothesis for each of the `copies` rows of every sentence, in their order."""
    options, state = rules.options, stepper.start(src)
    spread = torch.arange(src.shape[0], device=src.device).repeat_interleave(copies)
    if copies > 1:  # each draw a sentence of its own: they end one by one
        state = stepper.reorder(state, spread, spread)
    rules.keep(spread)
    limits = [limit for limit in rules.limits for _ in range(copies)]
    rows, least = list(range(len(limits))), min(limits, default=0)  # rows in the batch
    found: dict[int, Hypothesis] = {}
    totals = torch.zeros(len(limits), device=src.device)
    last, tokens = torch.full_like(spread, options.bos), spread.new_empty((len(limits), 0))
    while True:
        log_probs, state = stepper.step(last, state)
        rules.mask(log_probs, tokens, 1)
        value, last = choose(log_probs, rows, tokens.shape[1])
        before, totals = totals, totals + value
        tokens = torch.cat([tokens, last[:, None]], 1)  # [R, t]
        values, ids, length = value.tolist(), last.tolist(), tokens.shape[1]
        if options.eos not in ids and length < least and math.isfinite(sum(values)):
            continue
        ended = [
            at
            for at, row in enumerate(rows)
            if row not in found
            and (ids[at] == options.eos or length >= limits[row] or not values[at] > NEVER)
        ]
        parts = (tokens[ended], totals[ended], before[ended])
        for at, *closing in zip(ended, *(part.tolist() for part in parts), strict=True):
            found[rows[at]] = _closed(options, values[at] > NEVER, *closing)
        if len(found) == len(limits):
            return [found[row] for row in range(len(limits))]
        kept = [at for at, row in enumerate(rows) if row not in found]
        if _COMPACT * (len(rows) - len(kept)) >= len(rows):
            keep = torch.tensor(kept, device=src.device)
            state = stepper.reorder(state, keep, keep)
            rules.keep(keep)
            rows, last = [rows[at] for at in kept], last[keep]
            tokens, totals = tokens[keep], totals[keep]
            least = min(limits[row] for row in rows)


def _closed(
    options: SearchOptions, valid: bool, ids: list[int], score: float, before: float
) -> Hypothesis:
    """The hypothesis whose last token is EOS, at the limit, or (not valid) not allowed."""
    finished = valid and ids[-1] == options.eos
    tokens = tuple(ids if valid and not finished else ids[:-1])
    total = score if valid else before
    return Hypothesis(tokens, total, options.ranked(total, len(tokens), finished), finished)
