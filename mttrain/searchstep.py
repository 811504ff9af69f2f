"""One step of a search: what may follow, which are the best, which one is drawn.

Masks are set in place on the log-probabilities of a step and nothing is renormalised; they cost a
few columns, and only blocking repeated n-grams looks at all earlier tokens. The best are found by
chunk maxima first: three to five times faster than `torch.topk` alone on a CPU. Random numbers are
no stream: each is a hash of (seed, line, draw, step) (module hashing), so a drawn text is the same
in whatever batch. That costs microseconds per step; top_p costs a sort of the vocabulary.

Shapes: B sentences, b sentences still in the batch, W rows per sentence, R = b x W rows,
V vocabulary, t tokens so far.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from mttrain.errors import ConfigError
from mttrain.hashing import Keys, absorb, as_keys

NEVER = -math.inf  # log-probability of what may not follow
_CHUNK = 64  # scores per chunk whose maximum is taken first; the fastest of 16..128 on x86 CPUs


@dataclass(frozen=True)
class SearchOptions:
    """How to search. Lengths are in tokens; an illegal or ineffective setting is a ConfigError."""

    beam: int = 5  # hypotheses kept per sentence; 1 = greedy; not used when sampling
    nbest: int = 1  # hypotheses returned per sentence; when sampling: independent draws
    length_penalty: float = 1.0  # exponent A of the length that a score is divided by
    max_length: int | None = None  # tokens, EOS included; None = 3 x source + 20
    min_length: int = 0  # tokens, EOS not included
    no_repeat_ngram: int = 0  # no n-gram of this length occurs twice; 0 = off
    sample: bool = False  # draw tokens at random instead of searching
    temperature: float = 1.0  # log-probabilities are divided by it before drawing
    top_k: int = 0  # draw among the k most probable tokens; 0 = all
    top_p: float = 1.0  # draw among the fewest most probable tokens that hold this mass
    seed: int = 1  # of the draws
    forbidden: tuple[int, ...] = (0, 1, 2)  # padding, unknown and BOS: never produced
    bos: int = 2  # first decoder input
    eos: int = 3  # ends a hypothesis
    pad: int = 0  # filler of short source rows

    def __post_init__(self) -> None:
        problems = [text for wrong, text in self._rules() if wrong]
        if problems:
            raise ConfigError("; ".join(problems) + ".")

    def _rules(self) -> list[tuple[bool, str]]:
        most = None if self.max_length is None else self.max_length - 1
        penalty, heat = self.length_penalty, self.temperature
        drawing = heat != 1.0 or self.top_k != 0 or self.top_p != 1.0
        return [
            (self.beam < 1, f"beam is {self.beam}; it must be 1 (greedy) or more"),
            (self.nbest < 1, f"nbest is {self.nbest}; it must be 1 or more"),
            (
                not self.sample and self.nbest > self.beam >= 1,
                f"nbest {self.nbest} is more than beam {self.beam} can give; raise beam",
            ),
            (not -9 <= penalty <= 9, f"length_penalty is {penalty}; it must be from -9 to 9"),
            (most is not None and most < 0, f"max_length is {self.max_length}; it must be >= 1"),
            (self.min_length < 0, f"min_length is {self.min_length}; it must be 0 or more"),
            (
                most is not None and most >= 0 and self.min_length > most,
                f"min_length {self.min_length} and EOS do not fit in max_length {self.max_length}",
            ),
            (self.no_repeat_ngram < 0, f"no_repeat_ngram is {self.no_repeat_ngram}; 0 = off"),
            (
                not (heat > 0 and math.isfinite(heat)),
                f"temperature is {heat}; it must be above 0 (for the most probable token use "
                "beam 1 without sampling)",
            ),
            (self.top_k < 0, f"top_k is {self.top_k}; it must be 0 (all tokens) or more"),
            (not 0 < self.top_p <= 1, f"top_p is {self.top_p}; it must be above 0, at most 1"),
            (
                drawing and not self.sample,
                "temperature, top_k and top_p have an effect only together with sample",
            ),
        ]

    def ranked(self, score: float, tokens: int, finished: bool) -> float:
        """score / length^A; `tokens` without EOS. 0.0 for an output cut before its first token."""
        length = max(tokens + int(finished), 1)
        return score / math.pow(length, self.length_penalty)


@dataclass(frozen=True)
class Hypothesis:
    """One output. `score` is the natural log-probability of `tokens` and, if finished, of EOS."""

    tokens: tuple[int, ...]  # without EOS
    score: float
    ranked: float  # score / length^A
    finished: bool  # False: cut at the length limit, or nothing was allowed to follow


# ---- what may follow --------------------------------------------------------------------------


class Rules:
    """Length limits, forced prefixes and masks of one batch; prefixes are kept row by row."""

    def __init__(
        self,
        options: SearchOptions,
        src: Tensor,
        vocab: int,
        lengths: Sequence[int] | None,
        prefixes: Sequence[Sequence[int]] | None,
        limit: int | None,
    ) -> None:
        self.options = options
        if lengths is None:
            lengths = ((src != options.pad).sum(1) - 1).tolist()
        prefixes = [()] * len(lengths) if prefixes is None else prefixes
        self.limits = [
            self._limit(length, len(prefix), limit)
            for length, prefix in zip(lengths, prefixes, strict=True)
        ]
        widest = max((len(prefix) for prefix in prefixes), default=0)
        padded = [[*prefix, *[-1] * (widest - len(prefix))] for prefix in prefixes]
        self.prefix = torch.tensor(padded, device=src.device, dtype=torch.int64)
        self.prefix = self.prefix.view(len(padded), widest)  # -1 = free
        self.shortest = min((len(prefix) for prefix in prefixes), default=0)
        banned = sorted({token for token in options.forbidden if 0 <= token < vocab})
        self.banned = torch.tensor(banned, device=src.device, dtype=torch.int64)

    def _limit(self, source: int, prefix: int, cap: int | None) -> int:
        """Most tokens of a sentence, EOS included: a prefix and EOS always fit, a cap is hard."""
        wanted = self.options.max_length
        if wanted is None:
            # 3 x source + 20 is generous even from Chinese characters to English ones.
            wanted = max(3 * source + 20, self.options.min_length + 1)
        wanted = max(wanted, prefix + 1)
        return wanted if cap is None else max(1, min(wanted, cap))

    def keep(self, rows: Tensor) -> None:
        """Go on with these rows of the prefixes."""
        self.prefix = self.prefix.index_select(0, rows)

    def mask(self, log_probs: Tensor, tokens: Tensor, width: int) -> None:
        """Set what may not follow to -inf, in place: log_probs [R, V], tokens so far [R, t]."""
        step = tokens.shape[1]
        forced = None
        if step < self.prefix.shape[1]:
            forced = self.prefix[:, step].repeat_interleave(width)[:, None]  # [R, 1], -1 = free
            own = log_probs.gather(1, forced.clamp(min=0))
        if self.banned.numel():
            log_probs.index_fill_(1, self.banned, NEVER)
        if step < self.options.min_length:
            log_probs[:, self.options.eos] = NEVER
        if 0 < self.options.no_repeat_ngram <= step:
            _block_ngrams(log_probs, tokens, self.options.no_repeat_ngram)
        if forced is not None:
            # A forced token may be a forbidden one: the user asked for it by name.
            log_probs.masked_fill_(forced >= 0, NEVER)
            index = forced.clamp(min=0)
            kept = torch.where(forced >= 0, own, log_probs.gather(1, index))
            log_probs.scatter_(1, index, kept)


def _block_ngrams(log_probs: Tensor, tokens: Tensor, n: int) -> None:
    """Mask each token that would complete an n-gram already in tokens [R, t], t >= n, in place."""
    grams = tokens.unfold(1, n, 1)  # [R, t-n+1, n]
    tail = tokens[:, tokens.shape[1] - n + 1 :]  # [R, n-1]
    seen = (grams[:, :, :-1] == tail[:, None]).all(2)  # [R, t-n+1]; n = 1: every token
    cap = torch.zeros(seen.shape, device=tokens.device).masked_fill_(seen, NEVER)
    # Log-probabilities are at most 0, so the minimum with 0 leaves the unseen ones as they are.
    log_probs.scatter_reduce_(1, grams[:, :, -1], cap, "amin")


# ---- picking ------------------------------------------------------------------------------------


def top_scores(scores: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The `count` best of each row of [b, n] and their columns, best first, like `torch.topk`.

    A chunk with one of the best `count` is itself among the best `count` by its maximum, so only
    those chunks are searched. Fewer columns than `count` give them all.
    """
    rows, columns = scores.shape
    count = min(count, columns)
    chunks = columns // _CHUNK
    if chunks < 2 * count:  # too few to skip any
        return scores.topk(count)
    inside = chunks * _CHUNK
    grouped = scores[:, :inside].view(rows, chunks, _CHUNK)
    chosen = grouped.amax(2).topk(count).indices[:, :, None]  # [b, count, 1]
    offsets = torch.arange(_CHUNK, device=scores.device)
    columns_of = (chosen * _CHUNK + offsets).view(rows, -1)  # [b, count * chunk]
    values = grouped.gather(1, chosen.expand(-1, -1, _CHUNK)).view(rows, -1)
    if inside < columns:
        rest = torch.arange(inside, columns, device=scores.device).expand(rows, -1)
        columns_of = torch.cat([columns_of, rest], 1)
        values = torch.cat([values, scores[:, inside:]], 1)
    best, at = values.topk(count)
    return best, columns_of.gather(1, at)


def row_keys(seed: int, lines: Sequence[int], draws: int) -> Keys:
    """Keys [len(lines) * draws] of all draws of all lines; draws of one line are neighbours."""
    keys = absorb(absorb(as_keys([0]), as_keys([seed])), as_keys(lines))
    return absorb(np.repeat(keys, draws), np.tile(as_keys(range(draws)), len(lines)))


def uniform(keys: Keys, step: int) -> npt.NDArray[np.float32]:
    """A number in [0, 1) for each key [R] at this step; a multiple of 2^-24, exact in float32."""
    top = absorb(keys, as_keys([step])) >> np.uint64(40)
    return top.astype(np.float32) * np.float32(2.0**-24)


def draw(
    log_probs: Tensor, noise: Tensor, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0
) -> Tensor:
    """One column [R] per row of log_probs [R, V], by the inverse of its cumulative distribution.

    The distribution is softmax(log_probs / temperature), cut to its top_k columns (0 = all), then
    to the fewest whose mass reaches top_p (Holtzman et al. 2020, section 3.1), and scaled to 1.
    Columns at -inf are never drawn. noise [R] holds uniform numbers in [0, 1).
    """
    scores, columns = log_probs / temperature, None
    if 0 < top_k < scores.shape[1]:
        scores, columns = top_scores(scores, top_k)
    elif top_p < 1.0:
        scores, columns = scores.sort(dim=1, descending=True, stable=True)
    mass = scores.softmax(1)
    if top_p < 1.0:
        before = mass.cumsum(1) - mass  # 0 for the first column, which therefore always stays
        mass = mass.masked_fill(before >= top_p, 0.0)
    reached = mass.cumsum(1)
    # The first column whose cumulative mass is above noise x total has itself a mass above 0.
    at = torch.searchsorted(reached, noise[:, None] * reached[:, -1:], right=True)
    at = at.clamp_(max=mass.shape[1] - 1)  # reached only by a row that is all -inf or NaN
    return (at if columns is None else columns.gather(1, at))[:, 0]
