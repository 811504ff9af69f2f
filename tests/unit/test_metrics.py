"""Scores: what is refused before scoring, which tokenizer is used, and that settings show."""

from __future__ import annotations

import importlib
import json
import math
import os
import random
import sys
import types
from pathlib import Path
from urllib.error import URLError

import pytest

from mttrain.corpus import read_lines
from mttrain.errors import ConfigError, DataError, MissingDependency
from mttrain.metrics import (
    Score,
    bleu_tokenizer,
    cjk_warning,
    compare_systems,
    perplexity,
    require_tokenizer,
    score_corpus,
    tokenized_warning,
)
from mttrain.validation import Likelihood

REF = [
    "Two young, white males are outside near many bushes.",
    "Several men in hard hats are operating a giant pulley system.",
    "A little girl climbing into a wooden playhouse, isn't she?",
    "The man in the blue shirt is standing on a ladder.",
]


def bleu(hyps: list[str], *refs: list[str], **options: object) -> Score:
    (score,) = score_corpus(hyps, refs, metrics=["bleu"], **options)  # type: ignore[arg-type]
    return score


def worse(lines: list[str], seed: int, share: float) -> list[str]:
    """The lines with some of their words left out."""
    draw = random.Random(seed)
    return [" ".join(w for w in line.split() if draw.random() > share) for line in lines]


def test_equal_text_scores_full(tmp_path: Path) -> None:
    """The three metrics in the order asked for, each with its signature."""
    scores = score_corpus(REF, [REF])
    assert [(score.name, round(score.value, 6)) for score in scores] == [
        ("BLEU", 100.0),
        ("chrF", 100.0),
        ("TER", 0.0),
    ]
    assert [score.name for score in score_corpus(REF, [REF], metrics=["ter", "bleu"])] == [
        "TER",
        "BLEU",
    ]


def test_brevity_and_precision_by_hand() -> None:
    """BLEU of one line by arithmetic: 5 of 6 words, in order, with the brevity penalty."""
    score = bleu(["a b c d e"], ["a b c d e f"])
    # All n-gram precisions are 1; BP = exp(1 - 6/5).
    assert score.value == pytest.approx(100 * 2.718281828459045 ** (1 - 6 / 5))


@pytest.mark.parametrize("shift", [1, -1])
def test_unequal_line_counts_are_refused(shift: int) -> None:
    """E03, T10: sacreBLEU's interface pairs with zip: 2 lines against 1 score 100."""
    hyps = REF * 25
    refs = (REF * 26)[: len(hyps) + shift]
    with pytest.raises(DataError, match=rf"hypothesis has 100 lines.*has {100 + shift}"):
        bleu(hyps, refs)
    with pytest.raises(DataError, match="reference 2 has"):
        bleu(hyps, hyps, refs)
    with pytest.raises(DataError, match="baseline has 100"):
        compare_systems(hyps, refs, [refs])


def test_references_per_sentence_are_refused() -> None:
    """E04: a list per sentence instead of one per file scored the first sentence only."""
    with pytest.raises(DataError, match="hypothesis has 3 lines but reference 1 has 1; line n of"):
        score_corpus(REF[:3], [[line] for line in REF[:3]])
    with pytest.raises(DataError, match="one list of lines"):
        score_corpus(REF, REF)
    with pytest.raises(DataError, match="one list of lines"):
        score_corpus(REF, [])


def test_score_does_not_depend_on_the_order_of_sentences() -> None:
    """E04: with transposed references only the first sentence counted."""
    hyps, other = worse(REF, 1, 0.3), worse(REF, 2, 0.1)
    forward = score_corpus(hyps, [REF, other])
    backward = score_corpus(hyps[::-1], [REF[::-1], other[::-1]])
    assert [s.value for s in forward] == pytest.approx([s.value for s in backward])


def test_empty_hypotheses_count_as_empty() -> None:
    """E05: empty hypotheses were left out, and the reference was scored as the hypothesis."""
    values = {s.name: s.value for s in score_corpus([""] * 4, [REF])}
    assert values == {"BLEU": 0.0, "chrF": 0.0, "TER": 100.0}
    half = bleu([REF[0], "", REF[2], ""], REF)
    assert 0 < half.value < 60 and "BP = 0." in half.detail
    assert bleu([*REF[:3], ""], REF).value < 100


def test_empty_files_are_an_error_and_empty_output_is_zero() -> None:
    """E06: an empty corpus was an IndexError; early validation must give 0.0 and go on."""
    with pytest.raises(DataError, match="no lines to score"):
        score_corpus([], [[]])
    for score in score_corpus(["", "", "", ""], [REF], bootstrap=10):
        assert score.value in (0.0, 100.0)


def test_case_counts_and_the_signature_says_so() -> None:
    """E07: cased and uncased numbers were compared with each other."""
    lower = [line.lower() for line in REF]
    cased, uncased = bleu(lower, REF), bleu(lower, REF, lowercase=True)
    assert cased.value < 100 and uncased.value == pytest.approx(100)
    assert "case:mixed" in cased.signature and "case:lc" in uncased.signature
    for score in score_corpus(lower, [REF]):
        for part in ("nrefs:1", "version:"):
            assert part in score.signature
        assert score.signature in score.text()
        assert json.loads(json.dumps(score.to_dict()))["signature"] == score.signature
    assert cased.tokenizer == "13a" and "tok:13a|smooth:exp" in cased.signature


def test_several_references_count_once_each() -> None:
    """E08: a reference was counted twice, or only the first was used."""
    hyps, other = worse(REF, 1, 0.3), worse(REF, 1, 0.25)
    both, swapped = bleu(hyps, REF, other), bleu(hyps, other, REF)
    assert both.value == swapped.value
    assert "nrefs:2" in both.signature
    twice = bleu(hyps, REF, REF)
    assert twice.value == pytest.approx(bleu(hyps, REF).value)
    assert both.value >= twice.value


def test_tokenizers_by_language() -> None:
    """E02: the default tokenizer sees one word per Chinese or Japanese sentence."""
    for lang, name in {
        "zh": "zh",
        "zh-CN": "zh",
        "zho_Hans": "zh",
        "ja": "ja-mecab",
        "jpn_Jpan": "ja-mecab",
        "ko": "ko-mecab",
        "EN": "13a",
        "": "13a",
    }.items():
        assert bleu_tokenizer(lang) == name
    assert bleu_tokenizer(None) == "13a"
    assert bleu_tokenizer("jav") == "13a"  # Javanese


def test_chinese_needs_its_tokenizer() -> None:
    """E02: 0 against 63 for the same pair of lines."""
    hyp, ref = ["我今天早上吃了一个苹果。"], ["我今天早上吃了两个苹果。"]
    assert bleu(hyp, ref).value < 1
    score = bleu(hyp, ref, lang="zh")
    assert score.value > 50 and "tok:zh" in score.signature
    assert bleu(hyp, ref, lang="zh", tokenize="char").tokenizer == "char"
    warning = cjk_warning(ref, "13a")
    assert warning is not None and "13a" in warning
    assert cjk_warning(ref, "zh") is None and cjk_warning(REF, "13a") is None
    assert cjk_warning(["これはペンです。 OK", ""], "13a") is not None
    assert cjk_warning([], "13a") is None


def test_missing_or_unknown_tokenizers_are_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    """E02: without its extra package sacreBLEU raises a RuntimeError over several lines. The advice
    is the README's: there is no package of that name to install from elsewhere."""
    for name, language in {"ja": "ja-mecab", "ko": "ko-mecab"}.items():
        module = f"sacrebleu.tokenizers.tokenizer_{language.replace('-', '_')}"
        importlib.import_module(module)
        monkeypatch.setattr(f"{module}.MeCab", None)
        with pytest.raises(MissingDependency) as error:
            bleu(["a"], ["a"], lang=name)
        text = str(error.value)
        assert f"{language} needs a package that is not installed" in text and "\n" not in text
        command = "pip install 'mttrain[zh_ja_ko]'"
        readme = Path(__file__).resolve().parents[2] / "README.md"
        assert command in text and command in readme.read_text(encoding="utf-8")
        with pytest.raises(MissingDependency):
            require_tokenizer(language)
    with pytest.raises(ConfigError, match="Unknown BLEU tokenizer '14b'; there are none, zh, 13a"):
        bleu(["a"], ["a"], tokenize="14b")
    with pytest.raises(ConfigError, match="Unknown metric 'rouge'"):
        score_corpus(REF, [REF], metrics=["rouge"])
    require_tokenizer("13a")


def test_tokenizers_of_sentencepiece(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """E02: flores200 advised the Japanese package, and a failed download was a traceback."""
    importlib.import_module("sacrebleu.tokenizers.tokenizer_spm")
    monkeypatch.setitem(sys.modules, "sentencepiece", None)  # as if it were not installed
    with pytest.raises(MissingDependency, match=r"flores200 .*: pip install sentencepiece, or"):
        require_tokenizer("flores200")

    def no_network(*_: object) -> None:
        raise URLError("no\nroute to host")

    stand_in = types.SimpleNamespace(SentencePieceProcessor=object)
    monkeypatch.setitem(sys.modules, "sentencepiece", stand_in)
    monkeypatch.setattr("sacrebleu.tokenizers.tokenizer_spm.download_file", no_network)
    monkeypatch.setattr("sacrebleu.tokenizers.tokenizer_spm.SACREBLEU_DIR", str(tmp_path))
    with pytest.raises(MissingDependency, match=r"could not download: no route to host\. Try"):
        require_tokenizer("flores200")


def test_perplexity() -> None:
    """M18: exp() of a large loss raised OverflowError after the work was done."""
    assert perplexity(0.0) == 1.0 and perplexity(1.0) == pytest.approx(math.e)
    assert math.isfinite(perplexity(709.0))
    assert perplexity(800.0) == perplexity(math.inf) == math.inf
    assert math.isnan(perplexity(math.nan))
    assert Likelihood(nll=800.0, accuracy=0.0, tokens=1).perplexity == math.inf


def test_tokenised_text_is_pointed_out(caplog: pytest.LogCaptureFixture) -> None:
    """E01: tokenised text gives another, often higher number."""
    warning = tokenized_warning(["Hello , world ."])
    assert warning is not None and "1 of 1" in warning
    assert tokenized_warning(["Hello, world."] * 3) is None
    assert tokenized_warning([]) is None
    # sacreBLEU's own limit: 100 lines, whatever their share.
    assert tokenized_warning(["x ."] * 100 + ["x."] * 900) is not None
    assert tokenized_warning(["x ."] * 99 + ["x."] * 900) is None
    bleu(["x ."] * 100, ["x."] * 100)
    assert not caplog.records  # said once, by us


def test_line_end_noise_is_gone_before_scoring(tmp_path: Path) -> None:
    """E11, T03, T05: a byte order mark on one line drops BLEU from 100 to 67."""
    path = tmp_path / "hyp"
    path.write_bytes(b"\xef\xbb\xbf" + "\r\n".join(REF).encode() + b"\r\n")
    assert bleu(list(read_lines(path)), REF).value == pytest.approx(100)
    path.write_text("\n".join(line + "  " for line in REF) + "\n")
    assert bleu(list(read_lines(path)), REF).value == pytest.approx(100)
    path.write_bytes(f"{REF[0]}\u2028\rx\n{REF[1]}\n{REF[2]}\n{REF[3]}\n".encode())
    assert len(list(read_lines(path))) == len(REF)


def test_composed_and_decomposed_letters_differ() -> None:
    """T16: nothing is normalised in eval either: the policy is the same everywhere."""
    assert bleu(["un cafe\u0301 noir ici"], ["un café noir ici"]).value < 100


def test_bootstrap_interval_and_seed() -> None:
    """The interval must hold the score, say how it was made, and repeat with its seed."""
    hyps = worse(REF * 10, 3, 0.2)
    first = bleu(hyps, REF * 10, bootstrap=200)
    again = bleu(hyps, REF * 10, bootstrap=200)
    other = bleu(hyps, REF * 10, bootstrap=200, seed=7)
    assert first == again and first.ci is not None and other.ci != first.ci
    mean, half = first.ci
    assert abs(first.value - mean) < half
    assert "bs:200|seed:12345" in first.signature and "seed:7" in other.signature
    assert f"(μ = {mean:.2f} ± {half:.2f})" in first.text()
    assert "SACREBLEU_SEED" not in os.environ
    assert bleu(hyps, REF * 10).ci is None


def test_environment_seed_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """The seed passes through the environment, which must be as before."""
    monkeypatch.setenv("SACREBLEU_SEED", "99")
    assert "seed:5" in bleu(REF, REF, bootstrap=5, seed=5).signature
    assert os.environ["SACREBLEU_SEED"] == "99"


def test_paired_test_tells_better_from_equal() -> None:
    """Equal systems were called different with p = 0.001."""
    refs = REF * 20
    good, bad = worse(refs, 1, 0.05), worse(refs, 2, 0.4)
    for result in compare_systems(bad, good, [refs], samples=200):
        better = -1 if result.name == "TER" else 1
        assert better * result.delta > 5 and result.p_value < 0.05
        assert f"{result.delta:+.2f}" in result.text() and "(significant" in result.text()
        assert "bs:200|seed:12345" in result.signature
    for result in compare_systems(good, good, [refs], samples=50):
        assert result.delta == 0 and result.p_value == 1 and "not significant" in result.text()
    near = worse(refs, 3, 0.05)
    (result,) = compare_systems(good, near, [refs], samples=200, metrics=["bleu"])
    assert result.p_value > 0.05
    assert result.to_dict()["system"] == bleu(near, refs).value


def test_resamples_that_score_nothing() -> None:
    """sacreBLEU's mean of numbers of two types ended in a TypeError: where a bad system has a hit
    or two, some resamples score exactly nothing."""
    hyps, refs = ["x y z"] * 40, ["a b c d e"] * 38 + ["x y z w", "x y"]
    for score in score_corpus(hyps, [refs], bootstrap=200):
        assert score.ci is not None and all(type(number) is float for number in score.ci)
    for found in compare_systems(hyps, hyps[::-1], [refs], samples=50):
        assert found.p_value == 1.0
