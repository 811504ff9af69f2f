"""Minimum Bayes risk decoding: sacreBLEU in a double loop is the oracle of the utilities."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sacrebleu.metrics.bleu import BLEU
from sacrebleu.metrics.chrf import CHRF

from mttrain.errors import ConfigError
from mttrain.mbr import choose_by_mbr, make_utility, weights
from mttrain.translations import TranslatedHypothesis, Translation

# Empty and blank texts, texts shorter than any order, repeats, punctuation that BLEU splits off,
# characters beyond 16 bits, and languages without spaces.
EDGES = [
    "", " ", "a", "a a", "aa aa", "a a a a a a a", "a b a b a b", "Ein kleines Haus.",
    "Ein  kleines Haus .", "3.5 kg (ca.), \"gut\"", "abcdef", "abcdefg", "𝔞𝔟𝔠 🏠🏠",
    "小さな家です。", "小さな 家です。", "这是一个小房子。", "gut &amp; schön", "x\u00a0y",
]  # fmt: skip
UTILITIES = [("chrf", "de"), ("bleu", "de"), ("bleu", "zh-CN")]


def of_sacrebleu(name: str, lang: str) -> Callable[[str, str], float]:
    """One pair, by the class behind sacreBLEU's sentence_chrf and sentence_bleu."""
    if name == "chrf":
        chrf = CHRF()
        return lambda one, other: float(chrf.sentence_score(one, [other]).score)
    bleu = BLEU(effective_order=True, tokenize="zh" if lang == "zh-CN" else "13a")
    return lambda one, other: float(bleu.sentence_score(one, [other]).score)


def assert_like_sacrebleu(name: str, lang: str, texts: Sequence[str]) -> None:
    single = of_sacrebleu(name, lang)
    wanted = [[single(one, other) for other in texts] for one in texts]
    np.testing.assert_allclose(make_utility(name, lang)(texts), wanted, rtol=1e-12, atol=1e-10)


@pytest.mark.parametrize(("name", "lang"), UTILITIES)
def test_utilities_of_odd_texts(name: str, lang: str) -> None:
    """Stops hypothesis and reference from changing places, n-grams that run into the next text,
    counts that are not clipped, and other rules than sacreBLEU's for what is short or empty."""
    assert_like_sacrebleu(name, lang, EDGES)
    assert_like_sacrebleu(name, lang, EDGES[::-1])


@pytest.mark.parametrize(("name", "lang"), UTILITIES)
@settings(max_examples=25)
@given(texts=st.lists(st.text("ab c.", max_size=24), min_size=1, max_size=6))
def test_utilities_of_any_texts(name: str, lang: str, texts: list[str]) -> None:
    """The same for texts of few letters, in which n-grams come again and again."""
    assert_like_sacrebleu(name, lang, texts)


def hypothesis(
    text: str, score: float = -1.0, finished: bool = True, tokens: Sequence[int] = (9,)
) -> TranslatedHypothesis:
    return TranslatedHypothesis(text, score, score / 2, finished, tuple(tokens))


def translation(*found: TranslatedHypothesis, line: int = 1) -> Translation:
    return Translation(line, "source", found)


def random_list(seed: int) -> list[TranslatedHypothesis]:
    """24 candidates of a line, some of them equal."""
    draw = random.Random(seed)
    words = ["das", "ein", "kleine", "kleines", "Haus", "Häuser", "ist", "sind", "rot", "."]
    texts = [" ".join(draw.choices(words, k=draw.randint(3, 7))) for _ in range(16)]
    return [hypothesis(draw.choice(texts), draw.uniform(-6, -1)) for _ in range(24)]


@pytest.mark.parametrize("sampled", [True, False])
@pytest.mark.parametrize(("name", "lang"), UTILITIES[:2])
def test_the_order_is_that_of_a_double_loop(name: str, lang: str, sampled: bool) -> None:
    """Stops merging equal texts from losing their weights, weights of the candidate where those of
    the reference belong, and samples that are weighed by their probabilities once more."""
    single = of_sacrebleu(name, lang)
    for seed in range(3):
        found = random_list(seed)
        share = [1.0 if sampled else math.exp(h.score) for h in found]
        wanted = [
            sum(w * single(one.text, h.text) for h, w in zip(found, share, strict=True))
            / sum(share)
            for one in found
        ]
        source = translation(*found)
        (chosen,) = choose_by_mbr([source], make_utility(name, lang), sampled=sampled)
        order = sorted(range(24), key=lambda i: (-round(wanted[i], 9), -found[i].score))
        assert [h.text for h in chosen.hypotheses] == [found[i].text for i in order]
        for h, i in zip(chosen.hypotheses, order, strict=True):
            assert h.utility == pytest.approx(wanted[i], abs=1e-9)
            assert (h.score, h.ranked, h.tokens) == (found[i].score, found[i].ranked, (9,))
        assert chosen.text != source.text or seed  # the first is not always the best


def test_a_text_drawn_often_wins() -> None:
    """Samples say by how often they come what they weigh: duplicates must not be dropped."""
    texts = ["ja", "Tor", "Tor", "Tor", "nein"]
    found = translation(*[hypothesis(text, -float(i)) for i, text in enumerate(texts)])
    (chosen,) = choose_by_mbr([found], make_utility("chrf"), sampled=True)
    assert [h.text for h in chosen.hypotheses] == ["Tor", "Tor", "Tor", "ja", "nein"]
    assert [h.utility for h in chosen.hypotheses[:3]] == pytest.approx([60.0] * 3)


def test_weights() -> None:
    """A list weighs its probabilities, without underflow; what has no end weighs nothing beside
    what has one; draws weigh the same."""
    ended = [hypothesis("a", math.log(0.5)), hypothesis("b", math.log(0.25))]
    cut = hypothesis("c", math.log(0.9), finished=False)
    assert list(weights([*ended, cut], sampled=False)) == pytest.approx([2 / 3, 1 / 3, 0])
    assert list(weights([*ended, cut], sampled=True)) == pytest.approx([1 / 3] * 3)
    assert list(weights([cut, cut], sampled=False)) == pytest.approx([0.5, 0.5])
    low = [hypothesis("a", -2000.0), hypothesis("b", -2000.0 - math.log(3))]
    assert list(weights(low, sampled=False)) == pytest.approx([0.75, 0.25])


def test_ties_and_cut_outputs() -> None:
    """Stops the last digits of a sum from deciding between equally good candidates, and an output
    without an end from being the best while others have one."""
    utility = make_utility("chrf")
    pair = [hypothesis("abc", -3.0), hypothesis("xyz", -2.0)]
    (chosen,) = choose_by_mbr([translation(*pair)], utility, sampled=True)
    assert chosen.text == "xyz"  # the higher score
    pair = [hypothesis("abc", -2.0), hypothesis("xyz", -2.0)]
    (chosen,) = choose_by_mbr([translation(*pair)], utility, sampled=True)
    assert chosen.text == "abc"  # the earlier
    cut = [hypothesis("abcd", -1.0, finished=False) for _ in range(3)]
    (chosen,) = choose_by_mbr([translation(*cut, pair[0])], utility, sampled=True)
    assert [h.text for h in chosen.hypotheses] == ["abc", "abcd", "abcd", "abcd"]
    # The sum of 0.1, 0.2 and 0.3 depends on their order in its last digit.
    shares = [0.1, 0.2, 0.3, 0.3, 0.2, 0.1]
    sums = [hypothesis(t, math.log(p)) for t, p in zip("aaabbb", shares, strict=True)]
    (chosen,) = choose_by_mbr([translation(*sums)], utility, sampled=False)
    assert "".join(h.text for h in chosen.hypotheses) == "ababab"


def test_what_is_told_of_the_best_is_true() -> None:
    """The flags of a translation are those of the output that was chosen; a blank line passes."""
    looped = hypothesis("abc " * 9, tokens=[5] * 9)
    cut = [hypothesis("xyz", finished=False), hypothesis("xyy", finished=False)]
    blank = Translation(2, " ", (hypothesis("", 0.0, tokens=()),), blank=True)
    given_lines = [translation(hypothesis("xyz"), looped, looped), blank, translation(*cut, line=3)]
    first, second, third = choose_by_mbr(given_lines, make_utility("chrf"), sampled=True)
    assert first.text == looped.text and first.flags() == ["looped"]
    assert second is blank
    assert third.flags() == ["hit_limit"] and third.line == 3 and third.source == "source"


def test_lines_are_answered_one_by_one() -> None:
    """Stops the whole input from being read before the first line comes out."""
    pulled = []

    def lines() -> Iterator[Translation]:
        for number in range(1, 4):
            pulled.append(number)
            yield translation(hypothesis("a"), hypothesis("b"), line=number)

    chosen = choose_by_mbr(lines(), make_utility("chrf"), sampled=False)
    assert next(chosen).line == 1 and pulled == [1]


def test_unknown_utility() -> None:
    """A misspelt name is told with what there is."""
    with pytest.raises(ConfigError, match="Unknown utility 'ter'; there are chrf, bleu"):
        make_utility("ter")
