"""The rules for pairs: in arrays as for one pair, and the memory of pairs against a set."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from mttrain.pairrules import REASONS, USED, HashSet, PairRules, as_settings, pair_hash

LENGTH = st.integers(1, 12)


@given(
    st.lists(st.tuples(LENGTH, LENGTH, st.booleans()), max_size=30),
    st.integers(2, 10),
    st.none() | st.floats(1.0, 5.0),
    st.booleans(),
)
def test_the_first_reason_is_told(
    rows: list[tuple[int, int, bool]], longest: int, ratio: float | None, tagged: bool
) -> None:
    """D01: counted by one order of the rules and left out by another, figures and training differ.
    A tag takes one of the length and has no part in the rest."""
    source, target = (np.array([row[side] for row in rows], dtype=np.int64) for side in (0, 1))
    blank = np.array([row[2] for row in rows], dtype=np.bool_)
    codes = PairRules(longest, ratio).codes(source, target, blank, tagged)
    for (one, two, empty), code in zip(rows, codes.tolist(), strict=True):
        words = one - 1, two - 1
        if empty or 0 in words:
            assert REASONS[code - 1] == "blank" and code != USED
        elif one + tagged > longest or two > longest:
            assert REASONS[code - 1] == "too_long" and code != USED
        elif ratio is not None and max(words) > ratio * min(words):
            assert REASONS[code - 1] == "ratio" and code != USED
        else:
            assert code == USED


@given(st.lists(st.lists(st.integers(0, 60) | st.integers(0, 2**64 - 1), max_size=40), max_size=8))
def test_hashes_are_remembered_as_by_a_set(blocks: list[list[int]]) -> None:
    """A pair that comes again in the same block, one in a later block, and the number that marks a
    free place."""
    table, seen = HashSet(), set()
    for block in blocks:
        wanted = []
        for number in block:
            number = max(number, 1)  # 0 and 1 are one
            wanted.append(number not in seen)
            seen.add(number)
        assert table.add(np.array(block, dtype=np.uint64)).tolist() == wanted
    assert len(table) == len(seen)


def test_hash_table_grows() -> None:
    """More numbers than places, many of which want the same place."""
    table, numbers = HashSet(), (np.arange(1, 50_001, dtype=np.uint64) << np.uint64(13))
    for block in np.array_split(numbers, 13):
        assert table.add(block).all()
    assert len(table) == 50_000 and not table.add(numbers).any()


def test_fresh_rules_remember_nothing() -> None:
    """One object serves one pass: a second pass would find all pairs repeated."""
    rules = PairRules(9, 2.5, drop_duplicates=True)
    hashes = np.array([pair_hash("a", "b", None), pair_hash("a", "b", "bt")], dtype=np.uint64)
    assert rules.new(hashes).all() and not rules.new(hashes).any()
    again = PairRules(**as_settings(rules))
    assert again.new(hashes).all() and (again.max_length, again.max_ratio) == (9, 2.5)
