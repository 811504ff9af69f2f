"""Reranking by further models: one forced pass for each pair is the oracle of the scores."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mttrain.checkpoint import ModelBundle
from mttrain.errors import ConfigError
from mttrain.rerank import Reranker, Role, rerank, role_of
from mttrain.translations import TranslatedHypothesis, Translation
from mttrain.translator import TranslateOptions, Translator

LINES = ["the small house.", "", "a dog", "the dog runs", "läuft"]
OPTIONS = TranslateOptions(beam=4, nbest=4, max_length=8, min_length=2, length_penalty=0.7)


@pytest.fixture(scope="module")
def model(random_run: Path) -> Translator:
    return Translator.load(random_run, device="cpu")


@pytest.fixture(scope="module")
def lists(model: Translator) -> list[Translation]:
    return list(model.translate_lines(LINES, OPTIONS))


def meta(source: Any, target: Any) -> dict[str, Any]:
    return {"source_lang": source, "target_lang": target}


@pytest.mark.parametrize(
    ("first", "second", "back"),
    [
        (("en", "de"), ("en", "de"), False),
        (("en", "de"), ("de", "en"), True),
        (("en", "de"), ("de-AT", "en_GB"), True),
        (("zh-CN", "en"), ("en", "cmn"), True),
        (("zh", "ja"), ("jpn", "zho"), True),
        (("en", "en"), ("en", "en"), False),  # such as to plain English
        (("pt-BR", "pt-PT"), ("pt-PT", "pt_BR"), True),
        (("zh-Hans", "zh-Hant"), ("zh-Hans", "zh-Hant"), False),
        (("pt-BR", "pt-PT"), ("pt", "pt"), None),  # nothing says which is which
        (("en", "de"), ("de", "fr"), None),
        (("en", "de"), ("en", "fr"), None),
        (("en", "de"), ("eng", "deu"), None),  # nothing says which is which
        (("en", "de"), (None, None), None),
        ((None, None), (None, None), None),
        ((None, None), ("en", "de"), None),
    ],
)
def test_direction(first: Any, second: Any, back: bool | None) -> None:
    """A model of another direction would give numbers, and any order would look like a result."""
    if back is not None:
        assert role_of(meta(*first), meta(*second), "runs/x") == Role(back)
        return
    with pytest.raises(ConfigError) as caught:
        role_of(meta(*first), meta(*second), "runs/x")
    names = ["-".join(lang or "unknown" for lang in langs) for langs in (first, second)]
    assert f"runs/x is a model for {names[1]}; to rerank {names[0]} it" in str(caught.value)


MANY = {**meta("en", "fr"), "tags": {"2fr": "fr", "2de": "de", "bt": None}, "untagged": False}
BOTH = {**meta("en", "de"), "tags": {"2de": "de", "2en": "en"}, "untagged": False}
PLAIN = meta("en", "en")  # such as to plain English
HOME = {**meta("de", "fr"), "tags": {"2fr": "fr", "2en": "en"}, "untagged": True}


@pytest.mark.parametrize(
    ("first", "tag", "second", "role"),
    [
        (MANY, "2de", meta("en", "de"), Role(False)),  # the tag decides the direction
        (MANY, "2de", meta("de", "en"), Role(True)),
        (MANY, "2fr", meta("de", "en"), None),
        (meta("en", "de"), None, MANY, Role(False, "2de")),  # and is found for the second
        (MANY, "2de", MANY, Role(False, "2de")),
        (MANY, "bt", MANY, Role(False, "bt")),
        (meta("en", "de"), None, HOME, Role(True, "2en")),
        (meta("de", "fr"), None, {**HOME, "tags": {}}, Role(False)),
        (meta("en", "fr"), None, {**MANY, "tags": {"bt": None}}, None),  # none fits
        # 2en of a model from English: from where is not said, so the target decides.
        (BOTH, "2en", meta("de", "en"), Role(False)),
        (BOTH, "2en", meta("fr", "en"), Role(False)),
        (BOTH, "2en", meta("deu", "eng"), None),  # nothing says which is which
        (BOTH, "2en", meta("en", "de"), Role(True)),
        (BOTH, "2en", BOTH, Role(False, "2en")),
        (BOTH, "2en", meta("de", "fr"), None),
        (BOTH, "2en", meta(None, None), None),
        (BOTH, "2de", meta("de", "en"), Role(True)),
        (BOTH, "2de", BOTH, Role(False, "2de")),
        (meta("de", "en"), None, BOTH, Role(True, "2de")),
        (meta("fr", "en"), None, BOTH, None),  # nothing says that it knows French
        (meta("en", "fr"), None, BOTH, None),
        # No tag turns the direction of a model within one language.
        ({**PLAIN, "tags": {"2en": "en"}}, "2en", meta("de", "en"), None),
        ({**PLAIN, "tags": {"2en": "en"}}, "2en", PLAIN, Role(False)),
    ],
)
def test_tags(first: Any, tag: str | None, second: Any, role: Role | None) -> None:
    """A model of several languages was asked for another language than that of the candidates, or
    for none, which it had never seen."""
    if role is not None:
        assert role_of(first, second, "runs/x", tag) == role
        return
    with pytest.raises(ConfigError, match=r"runs/x (is a model for|needs a tag before)"):
        role_of(first, second, "runs/x", tag)


@pytest.mark.parametrize("weight", [0.0, -1.0, float("nan"), float("inf")])
def test_weights_that_mean_nothing(weight: float, model: Translator) -> None:
    """Not a number ends in no order at all."""
    with pytest.raises(ConfigError, match=r"weight of a reranker is .*; it must be above 0"):
        Reranker(model, Role(False), weight)


@pytest.mark.parametrize("batching", [{}, {"window": 2}, {"batch_size": 1}, {"batch_tokens": 20}])
def test_the_sum_and_the_order(
    model: Translator, lists: list[Translation], batching: dict[str, Any]
) -> None:
    """Stops a reverse model from reading the source, weights that change places, scores of the
    line before or after, and a length that is not that of what was scored."""
    back = replace_languages(model)
    rerankers = [Reranker(model, Role(False), 0.5), Reranker(back, Role(True), 2.0)]
    options = replace(OPTIONS, **batching)
    found = list(rerank(iter(lists), rerankers, options))
    assert [t.source for t in found] == LINES and found[1] is lists[1]
    changed = 0
    for before, after in zip(lists, found, strict=True):
        if before.blank:
            continue
        wanted = []
        for h in before.hypotheses:
            (there,) = model.score([(before.source, h.text)])
            (home,) = back.score([(h.text, before.source)])
            scores = [there.sum / there.tokens**0.7, home.sum / home.tokens**0.7]
            wanted.append((h, scores, h.ranked + 0.5 * scores[0] + 2 * scores[1]))
        wanted.sort(key=lambda row: (not row[0].finished, -row[2]))
        for (h, scores, total), new in zip(wanted, after.hypotheses, strict=True):
            assert (new.text, new.score, new.ranked) == (h.text, h.score, h.ranked)
            assert new.rerank_scores == pytest.approx(scores, abs=1e-5)
            assert new.reranked == pytest.approx(total, abs=1e-5)
        changed += before.text != after.text
    assert changed  # or the order would say little


def replace_languages(model: Translator) -> Translator:
    """The same weights as a model of the reverse direction."""
    (bundle,) = model.bundles
    swapped = {**bundle.meta, "source_lang": "de", "target_lang": "en"}
    return Translator(
        ModelBundle(
            bundle.model, bundle.source_tokenizer, bundle.target_tokenizer, swapped, bundle.path
        )
    )


def test_what_was_cut_stays_behind(model: Translator) -> None:
    """The score of an output without an end lacks that of the end symbol: it would win."""
    good = TranslatedHypothesis("the house", -90.0, -30.0, True, (5, 6))
    cut = TranslatedHypothesis("the dog", -0.1, -0.05, False, (5, 7))
    lines = [Translation(1, "a", (good, cut)), Translation(2, "b", (cut, cut))]
    first, second = rerank(lines, [Reranker(model, Role(False))], OPTIONS)
    assert [h.text for h in first.hypotheses] == ["the house", "the dog"] and not first.flags()
    assert second.flags() == ["hit_limit"]


@pytest.mark.parametrize("batching", [{}, {"batch_size": 1}])
def test_what_a_reranker_cuts_is_told_once(
    model: Translator, lists: list[Translation], batching: dict[str, Any]
) -> None:
    """A judge that reads the beginning of a line or of a candidate gave its scores without a word.
    Which lines those are, a forced pass of each pair says."""
    long = TranslatedHypothesis("the dog " * 600, -9.0, -1.0, True, (5,))
    lines = [*lists, replace(lists[0], source="the dog " * 600, line=6)]
    lines.append(replace(lists[2], hypotheses=(*lists[2].hypotheses, long), line=7))
    back = replace_languages(model)
    options = replace(OPTIONS, **batching)
    for judges, wanted in (
        ([Reranker(model, Role(False))], [6]),
        ([Reranker(back, Role(True))], [7]),
        ([Reranker(model, Role(False)), Reranker(back, Role(True))], [6, 7]),
    ):
        cut = [
            t.line
            for t in lines
            for pairs in [[j.pair(t.source, h.text) for j in judges for h in t.hypotheses]]
            if not t.blank and any(score.cut for score in model.score(pairs))
        ]
        assert cut == wanted
        told: list[str] = []
        assert len(list(rerank(lines, judges, options, told.append))) == 7
        names = ", ".join(map(str, wanted))
        count = "1 line" if len(wanted) == 1 else f"{len(wanted)} lines"
        end = f"a reranking model; it judged what was left: line {names}"
        assert told == [f"warning: {count} had a text beyond the limit of {end}"]
    told.clear()
    list(rerank(lists, judges, options, told.append))
    assert told == []


def test_lines_come_out_window_by_window(model: Translator, lists: list[Translation]) -> None:
    """Somebody who types a line (batch size 1) waits for its answer before the next one."""
    pulled = []

    def source() -> Iterator[Translation]:
        for translation in lists:
            pulled.append(translation.line)
            yield translation

    for options, read in ((replace(OPTIONS, batch_size=1), [1]), (OPTIONS, [1, 2, 3, 4, 5])):
        pulled.clear()
        found = rerank(source(), [Reranker(model, Role(False))], options)
        assert next(found).line == 1 and pulled == read


def test_a_window_is_one_scoring(
    model: Translator, lists: list[Translation], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Line by line the batches would hold a handful of rows; and a text that was drawn twice is
    scored once."""
    calls: list[list[tuple[str, str]]] = []
    score = model.score

    def counted(pairs: list[tuple[str, str]], **how: Any) -> Any:
        calls.append(list(pairs))
        return score(pairs, **how)

    monkeypatch.setattr(model, "score", counted)
    twice = [replace(t, hypotheses=t.hypotheses * 2) for t in lists]
    assert len(list(rerank(twice, [Reranker(model, Role(False))], OPTIONS))) == len(lists)
    different = {(t.source, h.text) for t in lists for h in t.hypotheses if not t.blank}
    assert len(calls) == 1 and sorted(calls[0]) == sorted(different)


def test_the_tag_is_passed_on(model: Translator, lists: list[Translation]) -> None:
    """A model of several languages, asked without its tag, would score as for any of them."""
    with pytest.raises(ConfigError, match="was trained without tags"):
        list(rerank(lists, [Reranker(model, Role(False, "2de"))], OPTIONS))
