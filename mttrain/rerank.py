"""Reranking: other models judge the candidates of a line, and their scores join the model's own.

Candidates are put in the order of

    reranked = ranked + sum over k of W_k log p_k / length_k^A

where `ranked` is the first model's own score / length^A, and log p_k the log-probability that model
k gives, with its vocabulary, in length_k tokens (EOS counted): a model of the same direction to the
candidate, given the source line; a model of the reverse direction to the source line, given the
candidate. The latter is what a noisy channel has and a search lacks: a translation that leaves
something out explains the source badly (Yee et al. 2019, whose sum over t and s is this one for
A = 1 without their language model; Li & Jurafsky 2016). Which it is, the languages in meta.json
tell. The exponent is that of the search, so that all terms are of one kind: means for A = 1.

Price: one forced pass of each further model over the different candidates of a line; of the reverse
direction its decoder reads the source once for each. A few thousand pairs are in memory at a time.

Shapes: none; tensors are the engine's business.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from mttrain.errors import ConfigError, DataError
from mttrain.languages import base_code, same_language
from mttrain.segments import DEFAULT_BATCH_TOKENS
from mttrain.tags import direction, language_tag, listed, meta_tags, needed_tag
from mttrain.translations import TranslatedHypothesis, Translation, lines_warning
from mttrain.translator import ForcedScore, TranslateOptions, Translator

_PAIRS = 4096  # candidates scored together
_UNKNOWN = "unknown"  # a language that meta.json does not name
_ANY = "*"  # the source of a tag that asks for the language of the main source

_CUT = "had a text beyond the limit of a reranking model; it judged what was left"

Meta = Mapping[str, Any]
Pair = tuple[str, str]


@dataclass(frozen=True)
class Role:
    """What a further model does: in which direction it scores, and the tag before what it reads."""

    back: bool  # it translates back: it scores the source given the candidate
    tag: str | None = None


@dataclass(frozen=True)
class Reranker:
    """A further model, what it does, and its weight W."""

    translator: Translator
    role: Role
    weight: float = 1.0

    def __post_init__(self) -> None:
        if not (self.weight > 0 and math.isfinite(self.weight)):
            raise ConfigError(f"The weight of a reranker is {self.weight}; it must be above 0.")

    def pair(self, source: str, text: str) -> Pair:
        """What it reads and what it scores."""
        return (text, source) if self.role.back else (source, text)


def role_of(first: Meta, second: Meta, name: str, tag: str | None = None) -> Role:
    """What the second model does for the first one, by the languages in their meta.json.

    name: of the second one; tag: with which the first translates. A model with tags is asked for
    that same tag, if it has it, or for the tag of the language, such as 2de. Where the tag of the
    first leaves the source open (see `directions`), its target alone decides: what translates into
    that is of the same direction, what translates from it of the reverse one. ConfigError, naming
    both directions, when the languages are others, or are unknown, or could be both.
    """
    there = _languages(first, tag)
    known = meta_tags(second, Path(name))
    wanted = {False: tag if tag in known else language_tag(there[1]), True: language_tag(there[0])}
    roles = [Role(back, own if own in known else None) for back, own in wanted.items()]
    pairs = [_languages(second, role.tag)[:: -1 if role.back else 1] for role in roles]
    start = 1 if there[0] == _ANY else 0
    for same in (_same_codes, _equal_codes, _alike):
        fitting = [
            role
            for role, pair in zip(roles, pairs, strict=True)
            if same(there[start:], pair[start:])
        ]
        # Both fit where a model stays in one language (en-en): not a direction to be turned.
        if len(fitting) == 1 or (fitting and same is _same_codes):
            _check_tag(fitting[0], second, name)
            return fitting[0]
    raise ConfigError(
        f"{name} is a model for {'-'.join(_languages(second))}; to rerank {'-'.join(there)} it "
        f"must translate {'-'.join(there)} or {'-'.join(there[::-1])}."
    )


def _check_tag(role: Role, meta: Meta, name: str) -> None:
    if role.tag is None and needed_tag(meta, Path(name)) is not None:
        tags = listed(meta_tags(meta, Path(name)))
        raise ConfigError(f"{name} needs a tag before what it reads, and none fits: it has {tags}.")


def _languages(meta: Meta, tag: str | None = None) -> tuple[str, str]:
    source, target = direction(meta, tag)
    known, _ = direction(meta, None)
    return source or (_ANY if known else _UNKNOWN), target or _UNKNOWN


def _same_codes(one: Sequence[str], other: Sequence[str]) -> bool:
    """Regions and scripts count: from pt-BR to pt-PT is not from pt-PT to pt-BR."""
    whole = [[code.lower().replace("_", "-") for code in codes] for codes in (one, other)]
    return _UNKNOWN not in one and whole[0] == whole[1]


def _equal_codes(one: Sequence[str], other: Sequence[str]) -> bool:
    return _UNKNOWN not in one and [*map(base_code, one)] == [*map(base_code, other)]


def _alike(one: Sequence[str], other: Sequence[str]) -> bool:
    """Whether all codes may mean the same, such as "de" and "deu"."""
    named = not {_UNKNOWN, _ANY} & {*one, *other}
    return named and all(map(same_language, one, other))


def rerank(
    translations: Iterable[Translation],
    rerankers: Sequence[Reranker],
    options: TranslateOptions,
    tell: Callable[[str], None] | None = None,
) -> Iterator[Translation]:
    """Each translation with its hypotheses in the order of `reranked`, window by window.

    options: those of the search that found them; its lines are read ahead here too, or fewer. What
    ended stands before what was cut at the limit, as in the search; ties keep their order. Each
    hypothesis gets its `reranked` and its `rerank_scores`. Blank lines pass as they are.
    tell: gets a warning at the end that names the lines of which a reranker read only a part.
    """
    queue = iter(translations)
    lines = min(options.lines_ahead(), max(1, _PAIRS // options.nbest))
    cut: list[int] = []
    while window := list(itertools.islice(queue, lines)):
        scores = [_scores(window, reranker, options) for reranker in rerankers]
        for translation in window:
            if translation.blank:
                yield translation
                continue
            valued, shorter = [], False
            for hypothesis in translation.hypotheses:
                pair = translation.source, hypothesis.text
                found = [judged[pair] for judged in scores]
                each = tuple(_value(score, options) for score in found)
                terms = (r.weight * s for r, s in zip(rerankers, each, strict=True))
                total = hypothesis.ranked + sum(terms)
                valued.append(replace(hypothesis, reranked=total, rerank_scores=each))
                shorter = shorter or any(score.cut for score in found)
            if shorter:
                cut.append(translation.line)
            yield translation.reordered(sorted(valued, key=_rank))
    if cut and tell is not None:
        tell(lines_warning(cut, _CUT))


def _value(score: ForcedScore, options: TranslateOptions) -> float:
    """log p / length^A"""
    return score.sum / math.pow(score.tokens, options.length_penalty)


def _rank(hypothesis: TranslatedHypothesis) -> tuple[bool, float]:
    assert hypothesis.reranked is not None
    return not hypothesis.finished, -hypothesis.reranked


def _scores(
    window: Sequence[Translation], reranker: Reranker, options: TranslateOptions
) -> dict[Pair, ForcedScore]:
    """What a reranker says of every different pair of source line and candidate."""
    pairs = dict.fromkeys(
        (translation.source, hypothesis.text)
        for translation in window
        if not translation.blank
        for hypothesis in translation.hypotheses
    )
    try:
        found = reranker.translator.score(
            [reranker.pair(source, text) for source, text in pairs],
            tag=reranker.role.tag,
            batch_tokens=options.batch_tokens or DEFAULT_BATCH_TOKENS,
        )
    except DataError as error:
        lines = f"{window[0].line} to {window[-1].line}"
        raise DataError(f"Reranking the outputs of lines {lines}: {error}") from None
    return dict(zip(pairs, found, strict=True))
