"""Minimum Bayes risk decoding: of the candidates of a line, the one that most agrees with all.

The output is the candidate i of the greatest expected utility

    E(i) = sum over j of w_j u(i, j)

where u(i, j), 0 to 100, is the sentence chrF or sentence BLEU of candidate i against candidate j in
the place of a reference (Kumar & Byrne 2004 with a loss for the utility; Eikema & Aziz 2020, 2022).
A candidate is compared with itself too, as in these papers. The weights w sum to 1. Samples are
drawn in proportion to their probabilities already, so they weigh the same, and a text drawn three
times has three of them. The members of an n-best list weigh their probability exp(score), divided
by the sum over the list (Kumar & Byrne 2004); that of an output that was cut at the limit has no
end, is the probability of all that may follow, and counts only if no other ended.

Both utilities have sacreBLEU's definitions, for all pairs at once: the n-grams of all texts are
numbered order by order, and the clipped matches of all pairs are products of one matrix,

    sum over g of min(c_i(g), c_j(g)) = sum over k >= 1, g of [c_i(g) >= k] [c_j(g) >= k].

Price: for 32 different candidates of 70 characters 0.7 ms with chrF and 1 ms with BLEU, on one CPU
core (sacreBLEU, pair by pair: 100 and 26 ms); for 64 candidates twice that. To search or draw so
many candidates costs far more.

Shapes: C candidates of a line, U different texts among them, N n-gram orders, P positions in all
texts together, G n-grams.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from mttrain.errors import ConfigError
from mttrain.translations import TranslatedHypothesis, Translation

Numbers = npt.NDArray[np.float64]
Ids = npt.NDArray[np.int64]
Utility = Callable[[Sequence[str]], Numbers]
"""Texts [U] -> utilities [U, U], 0 to 100: the row is the hypothesis, the column the reference."""

UTILITIES = ("chrf", "bleu")
_CHRF_ORDER = 6  # sacreBLEU's defaults: characters without white space, no words,
_BETA2 = 4.0  # and beta 2: recall counts twice (Popović 2015, 2016)
_BLEU_ORDER = 4
_DIGITS = 9  # of a utility that decide: two sums of the same numbers differ after some 13


# ---- choosing ---------------------------------------------------------------------------------


def choose_by_mbr(
    translations: Iterable[Translation], utility: Utility, *, sampled: bool
) -> Iterator[Translation]:
    """Each translation with its hypotheses in the order of their expected utility, one by one.

    sampled: they are independent draws, rather than an n-best list. What ended stands before what
    was cut at the limit, as in the search; ties go to the higher score, then to the earlier. Each
    hypothesis gets its `utility`, and its scores stay the model's. Blank lines pass as they are.
    """
    for translation in translations:
        if translation.blank:
            yield translation
            continue
        found = translation.hypotheses
        expected = expected_utilities([h.text for h in found], weights(found, sampled), utility)
        valued = [
            replace(hypothesis, utility=float(value))
            for hypothesis, value in zip(found, expected, strict=True)
        ]
        yield translation.reordered(sorted(valued, key=_rank))


def _rank(hypothesis: TranslatedHypothesis) -> tuple[bool, float, float]:
    assert hypothesis.utility is not None
    return not hypothesis.finished, -round(hypothesis.utility, _DIGITS), -hypothesis.score


def weights(hypotheses: Sequence[TranslatedHypothesis], sampled: bool) -> Numbers:
    """What each hypothesis weighs as a reference, [C]; the sum is 1."""
    if sampled:
        return np.full(len(hypotheses), 1 / len(hypotheses))
    scores = np.array([hypothesis.score for hypothesis in hypotheses])
    ended = np.array([hypothesis.finished for hypothesis in hypotheses])
    if ended.any():
        scores = np.where(ended, scores, -np.inf)
    shares: Numbers = np.exp(scores - scores.max())
    return shares / float(shares.sum())


def expected_utilities(texts: Sequence[str], shares: Numbers, utility: Utility) -> Numbers:
    """E(i) of each text [C], where reference j weighs shares[j]; equal texts are compared once."""
    places = {text: place for place, text in enumerate(dict.fromkeys(texts))}
    where = np.array([places[text] for text in texts])
    summed = np.bincount(where, weights=shares, minlength=len(places))  # [U]
    expected: Numbers = (utility(list(places)) @ summed)[where]
    return expected


# ---- utilities --------------------------------------------------------------------------------


def make_utility(name: str, target_lang: str | None = None) -> Utility:
    """The utility "chrf" or "bleu"; the target language chooses the tokenisation inside BLEU.

    ConfigError for another name, MissingDependency where the tokenizer needs a missing package.
    """
    if name == "chrf":
        return chrf_of_pairs
    if name != "bleu":
        raise ConfigError(f"Unknown utility {name!r}; there are {', '.join(UTILITIES)}.")
    from sacrebleu.metrics.bleu import BLEU

    from mttrain.metrics import bleu_tokenizer, require_tokenizer

    chosen = bleu_tokenizer(target_lang)
    require_tokenizer(chosen)
    tokenize = BLEU(tokenize=chosen, force=True).tokenizer
    return lambda texts: bleu_of_pairs([tokenize(text.rstrip()).split() for text in texts])


def chrf_of_pairs(texts: Sequence[str]) -> Numbers:
    """chrF2 of each text against each, [U, U]: sacreBLEU's `sentence_chrf`, 0 to 100.

    Precision and recall are means over the orders that both texts have; 0 against an empty text.
    """
    matches, counts = _matches([list(map(ord, "".join(t.split()))) for t in texts], _CHRF_ORDER)
    hyp, ref = counts[:, :, None], counts[:, None, :]
    orders = np.maximum(((hyp > 0) & (ref > 0)).sum(0), 1)  # [U, U]
    precision = (matches / np.maximum(hyp, 1)).sum(0) / orders
    recall = (matches / np.maximum(ref, 1)).sum(0) / orders
    below = _BETA2 * precision + recall
    scores: Numbers = 100 * (1 + _BETA2) * precision * recall / np.where(below > 0, below, 1)
    return scores


def bleu_of_pairs(texts: Sequence[Sequence[str]]) -> Numbers:
    """BLEU of each list of words against each, [U, U]: sacreBLEU's `sentence_bleu`, 0 to 100.

    With its effective order (only the n-grams that the hypothesis is long enough for) and its
    smoothing "exp": the k-th order without a match counts 2^-k matches (Chen & Cherry 2014, 3).
    """
    numbers: dict[str, int] = {}
    ids = [[numbers.setdefault(word, len(numbers)) for word in words] for words in texts]
    matches, counts = _matches(ids, _BLEU_ORDER)
    hyp = counts[:, :, None]
    smoothed = np.where(matches > 0, matches, 0.5 ** np.cumsum(matches == 0, axis=0))
    logs = np.where(hyp > 0, np.log(smoothed / np.maximum(hyp, 1)), 0.0).sum(0)  # [U, U]
    length = counts[0]
    orders = np.clip(length, 1, _BLEU_ORDER)[:, None]
    brevity = np.minimum(0.0, 1 - length[None, :] / np.maximum(length, 1)[:, None])
    return np.where(matches[0] > 0, 100 * np.exp(brevity + logs / orders), 0.0)


# ---- n-grams of all texts ---------------------------------------------------------------------


def _matches(texts: Sequence[Sequence[int]], order: int) -> tuple[Numbers, Numbers]:
    """Clipped n-gram matches of all pairs [N, U, U] and the n-grams of each text [N, U].

    An n-gram is numbered by its first n - 1 symbols and its last one. What occurs once in all
    matches nothing, and neither does what begins with it: both are dropped.
    """
    lengths = np.array([len(text) for text in texts])
    counts = np.maximum(lengths - np.arange(order)[:, None], 0).astype(np.float64)
    matches = np.zeros((order, len(texts), len(texts)))
    owner = np.repeat(np.arange(len(texts)), lengths)  # [P]
    ends = np.repeat(np.cumsum(lengths), lengths)
    _, symbols = np.unique(np.array([s for text in texts for s in text]), return_inverse=True)
    at, grams = np.arange(len(symbols)), symbols
    for n in range(1, order + 1):
        if n > 1:
            inside = at + n <= ends[at]
            at, grams = at[inside], grams[inside]
            both = grams * len(symbols) + symbols[at + n - 1]
            _, grams = np.unique(both, return_inverse=True)
        again = np.bincount(grams) > 1
        kept = again[grams]
        at, grams = at[kept], (np.cumsum(again) - 1)[grams[kept]]
        matches[n - 1] = _overlaps(grams, owner[at], len(texts))
        np.fill_diagonal(matches[n - 1], counts[n - 1])
    return matches, counts


def _overlaps(grams: Ids, owner: Ids, texts: int) -> npt.NDArray[np.float32]:
    """Sum over n-grams of the smaller count, for each two texts [U, U]; the diagonal is undefined.

    grams, owner: number and text of each occurrence. Exact below 2^24, which no text reaches.
    """
    size = int(grams.max(initial=-1)) + 1
    found = np.bincount(grams * texts + owner, minlength=size * texts).reshape(size, texts)
    total = np.zeros((texts, texts), np.float32)
    level = 1
    while len(found):  # as often as an n-gram comes in two texts
        present = (found >= level).astype(np.float32)
        total += present.T @ present
        level += 1
        found = found[(found >= level).sum(1) > 1]
    return total
