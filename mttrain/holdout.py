"""Cut validation and test sets off a corpus, so that training sees nothing of them.

Held-out sentences are drawn at random, each of them once. A sentence counts as the same whatever
its case and spaces, and a pair leaves the training text when one of its sides is held out; to lose
little that way, sentences that stand only once in the corpus come first. All files appear
under their names when everything is written, or none does.

Price: two passes over the corpus besides the first look, and a copy of the training text.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from mttrain.corpus import LineWriter, Pair
from mttrain.errors import DataError

OVERSAMPLE = 4  # candidates for each sentence wanted, so that rare ones can be preferred
Pairs = Callable[[], Iterable[Pair]]
"""Reads the corpus from its beginning."""


def validation_size(pairs: int) -> int:
    """How many pairs to hold out for validation: 2 %, from 10 to 1,000, at most a fifth."""
    return max(1, min(max(10, pairs // 50), pairs // 5, 1_000))


def same(text: str) -> str:
    """What equal sentences have in common: no case, single spaces."""
    return " ".join(text.casefold().split())


def choose(
    candidates: Sequence[Pair], pairs: Pairs, wanted: Mapping[str, int]
) -> dict[str, list[Pair]]:
    """Split -> pairs for it, none sharing a side with another; DataError when there are too few.

    candidates: drawn at random, in random order. wanted: split -> number of pairs.
    """
    different = list(_different(candidates))
    counts = Counter[str](), Counter[str]()
    keys = tuple({same(getattr(pair, side)) for pair in different} for side in ("source", "target"))
    for pair in pairs():
        for known, count, text in zip(keys, counts, (pair.source, pair.target), strict=True):
            key = same(text)
            if key in known:
                count[key] += 1
    different.sort(key=lambda p: counts[0][same(p.source)] + counts[1][same(p.target)])
    total = sum(wanted.values())
    if len(different) < total:
        raise DataError(
            f"Only {len(different)} of the pairs that were drawn differ from each other on both "
            f"sides, and {total} are wanted; ask for fewer (--valid N, --test N), or give files "
            "(--valid-source F --valid-target F)."
        )
    found, start = {}, 0
    for split, number in wanted.items():
        found[split] = different[start : start + number]
        start += number
    return found


def _different(pairs: Iterable[Pair]) -> Iterator[Pair]:
    """The first of the pairs that share a side."""
    seen: tuple[set[str], set[str]] = set(), set()
    for pair in pairs:
        keys = same(pair.source), same(pair.target)
        if keys[0] not in seen[0] and keys[1] not in seen[1]:
            seen[0].add(keys[0])
            seen[1].add(keys[1])
            yield pair


def left_for_training(held_out: Mapping[str, Sequence[Pair]]) -> Callable[[Pair], bool]:
    """Whether a pair stays in the training text: it shares no side with one held out."""
    sources, targets = (
        {same(getattr(pair, side)) for chosen in held_out.values() for pair in chosen}
        for side in ("source", "target")
    )
    return lambda pair: same(pair.source) not in sources and same(pair.target) not in targets


def write_splits(
    pairs: Pairs,
    held_out: Mapping[str, Sequence[Pair]],
    files: Mapping[str, tuple[Path, Path]],
    more: Mapping[Path, str],
) -> int:
    """Write the held-out sets, and as "train" all pairs that share no side with them.

    more: other files to appear together with these, with their text. No file may exist. Returns the
    number of training pairs; DataError when none is left.
    """
    stays = left_for_training(held_out)
    made = [*(path for both in files.values() for path in both), *more]
    kept = 0
    with _all_or_none(made), contextlib.ExitStack() as stack:
        writers = {
            split: [stack.enter_context(LineWriter(path)) for path in both]
            for split, both in files.items()
        }
        for split, chosen in held_out.items():
            for pair in chosen:
                _write(writers[split], pair)
        for pair in pairs() if "train" in files else ():
            if stays(pair):
                _write(writers["train"], pair)
                kept += 1
        if "train" in files and kept == 0:
            raise DataError("No pair is left for training: each shares a side with one held out.")
        for path, text in more.items():
            writer = stack.enter_context(LineWriter(path))
            for line in text.removesuffix("\n").split("\n"):
                writer.write(line)
    return kept


def _write(writers: Sequence[LineWriter], pair: Pair) -> None:
    for writer, text in zip(writers, (pair.source, pair.target), strict=True):
        writer.write(text)


@contextlib.contextmanager
def _all_or_none(paths: Sequence[Path]) -> Iterator[None]:
    """Remove the files again when the last of them cannot be written."""
    try:
        yield
    except BaseException:
        for path in paths:
            path.unlink(missing_ok=True)
        raise
