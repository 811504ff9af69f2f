"""One step of a search: options, picking the best columns, drawing one, random numbers."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mttrain.errors import ConfigError
from mttrain.searchstep import SearchOptions, draw, row_keys, top_scores, uniform

NEVER = -math.inf


@pytest.mark.parametrize(
    ("settings", "word"),
    [
        ({"beam": 0}, "beam"),
        ({"beam": -1}, "beam"),
        ({"beam": 3, "nbest": 4}, "nbest"),
        ({"nbest": 0}, "nbest"),
        ({"length_penalty": math.nan}, "length_penalty"),
        ({"length_penalty": 1e6}, "length_penalty"),
        ({"max_length": 0}, "max_length"),
        ({"min_length": -1}, "min_length"),
        ({"min_length": 5, "max_length": 5}, "max_length"),
        ({"no_repeat_ngram": -2}, "no_repeat_ngram"),
        ({"sample": True, "temperature": 0.0}, "temperature"),
        ({"sample": True, "top_k": -1}, "top_k"),
        ({"sample": True, "top_p": 0.0}, "top_p"),
        ({"sample": True, "top_p": 1.5}, "top_p"),
        ({"top_k": 5}, "sample"),
        ({"temperature": 0.5}, "sample"),
    ],
)
def test_illegal_options(settings: dict[str, object], word: str) -> None:
    """S05, S06: refused where they are made, with the name of the setting; also settings without
    an effect."""
    with pytest.raises(ConfigError, match=word):
        SearchOptions(**settings)  # type: ignore[arg-type]


def test_all_problems_at_once() -> None:
    with pytest.raises(ConfigError, match=r"beam is 0.*min_length is -1"):
        SearchOptions(beam=0, min_length=-1)


@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 12),
    st.floats(0.05, 1.0),
    st.integers(0, 14),
    st.floats(0.0, 0.999),
    st.integers(0, 1000),
)
def test_draw_is_the_inverse_of_the_cut_distribution(
    size: int, top_p: float, top_k: int, noise: float, seed: int
) -> None:
    """Against a plain loop over the sorted probabilities, in float64, away from float ties."""
    torch.manual_seed(seed)
    scores = torch.randn(1, size).mul(2).log_softmax(1)
    token = int(draw(scores, torch.tensor([noise]), 1.0, top_k, top_p))
    order = sorted(range(size), key=lambda i: -float(scores[0, i]))
    order = order[:top_k] if top_k else order
    weights = torch.tensor([float(scores[0, i]) for i in order]).double().softmax(0).tolist()
    kept, mass = [], 0.0
    for index, weight in zip(order, weights, strict=True):
        if mass >= top_p:
            break
        kept.append((index, weight))
        mass += weight
    if not (0 < top_k < size or top_p < 1):
        kept.sort()
    target, reached = noise * sum(weight for _, weight in kept), 0.0
    edges = [reached := reached + weight for _, weight in kept]
    near_tie = any(abs(edge - target) < 1e-5 for edge in edges) or any(
        abs(sum(weights[: n + 1]) - top_p) < 1e-5 for n in range(len(weights))
    )
    if not near_tie:
        assert token == next(i for (i, _), edge in zip(kept, edges, strict=True) if edge > target)


def test_uniform_numbers_are_uniform_and_keyed() -> None:
    """Mean, variance and neighbours' correlation of 200,000 numbers; each ingredient matters."""
    keys = row_keys(1, range(1000), 2)
    table = torch.stack([torch.from_numpy(uniform(keys, step)) for step in range(100)]).double()
    assert float(table.min()) >= 0 and float(table.max()) < 1
    assert float(table.mean()) == pytest.approx(0.5, abs=0.003)
    assert float(table.var()) == pytest.approx(1 / 12, abs=0.002)
    for other in (table.roll(1, 0), table.roll(1, 1), table.roll(2, 1)):
        assert abs(float(torch.corrcoef(torch.stack([table.ravel(), other.ravel()]))[0, 1])) < 0.01
    assert len(set(row_keys(1, range(1000), 2)) & set(row_keys(2, range(1000), 2))) == 0
    assert len(set(row_keys(-1, [0, 2**63], 1))) == 2


# --- picking the best -------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 4), st.integers(1, 3000), st.integers(1, 30), st.integers(0, 1000))
def test_top_scores_is_topk(rows: int, columns: int, count: int, seed: int) -> None:
    """Chunk maxima must never hide one of the best: values and columns equal torch.topk's."""
    torch.manual_seed(seed)
    scores = torch.randperm(rows * columns).view(rows, columns).float()
    wanted = scores.topk(min(count, columns))
    values, indices = top_scores(scores, count)
    assert torch.equal(values, wanted.values) and torch.equal(indices, wanted.indices)


def test_top_scores_with_forbidden_columns() -> None:
    scores = torch.full((2, 1000), NEVER)
    scores[0, 700], scores[1, 999] = -1.0, -2.0
    values, indices = top_scores(scores, 2)
    assert values[:, 0].tolist() == [-1.0, -2.0] and indices[:, 0].tolist() == [700, 999]
    assert values[:, 1].tolist() == [NEVER, NEVER]


def test_options_can_be_replaced() -> None:
    """Frozen settings: another beam is another object, checked again."""
    with pytest.raises(ConfigError):
        replace(SearchOptions(beam=5, nbest=3), beam=2)
