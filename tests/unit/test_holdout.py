"""Held-out sets: drawn by a seed, each sentence once, and nothing of them left for training."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mttrain.corpus import Pair, read_pairs
from mttrain.errors import DataError
from mttrain.holdout import choose, same, validation_size, write_splits
from mttrain.survey import survey

Lines = list[tuple[str, str]]


def pairs(lines: Lines) -> list[Pair]:
    return [Pair(number, *line) for number, line in enumerate(lines, 1)]


def split(tmp_path: Path, lines: Lines, wanted: dict[str, int], seed: int = 1) -> dict[str, Lines]:
    """Cut, write, and read back what was written."""
    for path in tmp_path.iterdir():
        path.unlink()
    corpus = pairs(lines)
    _, sample = survey(corpus, sample=100, seed=seed)
    held = choose(sample, lambda: corpus, wanted)
    files = {name: (tmp_path / f"{name}.a", tmp_path / f"{name}.b") for name in ("train", *wanted)}
    count = write_splits(lambda: corpus, held, files, {tmp_path / "x.yaml": "a: 1\nb: 2\n"})
    assert (tmp_path / "x.yaml").read_text() == "a: 1\nb: 2\n"
    found = {
        name: [(p.source, p.target) for p in read_pairs(*both)] for name, both in files.items()
    }
    assert len(found["train"]) == count
    return found


@settings(
    suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=25, deadline=None
)
@given(
    st.lists(
        st.tuples(st.text("abAB ", min_size=0, max_size=3), st.text("xyXY ", max_size=3)),
        min_size=8,
        max_size=40,
    ),
    st.integers(0, 5),
)
def test_nothing_held_out_stays_in_training(tmp_path: Path, lines: Lines, seed: int) -> None:
    """Stops validation on text that training has seen, in other case or with other spaces too; and
    pairs that are lost or made up."""
    wanted = {"valid": 2, "test": 1}
    try:
        found = split(tmp_path, lines, wanted, seed)
    except DataError as error:
        assert "ask for fewer" in str(error) or "No pair is left" in str(error)
        return
    held = [pair for name in wanted for pair in found[name]]
    assert [len(found[name]) for name in wanted] == list(wanted.values())
    for side in (0, 1):
        texts = [same(pair[side]) for pair in held]
        assert len(set(texts)) == len(texts)
        assert not {same(pair[side]) for pair in found["train"]} & set(texts)
    kept = [
        pair
        for pair in lines
        if not any(same(pair[side]) == same(other[side]) for other in held for side in (0, 1))
    ]
    assert found["train"] == kept
    assert all(pair in lines and pair[0].strip() and pair[1].strip() for pair in held)


def test_sentences_that_stand_once_come_first(tmp_path: Path) -> None:
    """Stops a held-out "Yes." from taking each "Yes." out of the training text."""
    lines = [("yes", f"ja {n}") for n in range(30)] + [(f"one {n}", f"eins {n}") for n in range(60)]
    for seed in range(5):
        found = split(tmp_path, lines, {"valid": 10}, seed)
        assert len(found["train"]) == 80


def test_seeds_decide(tmp_path: Path) -> None:
    lines = [(f"a{n}", f"b{n}") for n in range(80)]
    one, two, other = (split(tmp_path, lines, {"valid": 9}, seed) for seed in (1, 1, 2))
    assert one == two and one["valid"] != other["valid"]


def test_a_failure_leaves_nothing(tmp_path: Path) -> None:
    """Stops half a set of files when the corpus breaks off, or the last file cannot be written."""
    corpus = pairs([(f"a{n}", f"b{n}") for n in range(20)])

    def broken() -> Iterable[Pair]:
        yield from corpus[:10]
        raise DataError("line 11 is not UTF-8")

    files = {name: (tmp_path / f"{name}.a", tmp_path / f"{name}.b") for name in ("train", "valid")}
    with pytest.raises(DataError, match="line 11"):
        write_splits(broken, {"valid": corpus[:2]}, files, {})
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(DataError, match="does not exist"):
        missing = tmp_path / "none" / "x.yaml"
        write_splits(lambda: corpus, {"valid": corpus[:2]}, files, {missing: "a"})
    assert list(tmp_path.iterdir()) == []


def test_sizes_of_validation_sets() -> None:
    """Stops a validation set that eats a small corpus, or that takes minutes to translate."""
    sizes = [validation_size(pairs) for pairs in (2, 5, 49, 50, 400, 29_000, 10**7)]
    assert sizes == [1, 1, 9, 10, 10, 580, 1000]
    assert sizes == sorted(sizes)
