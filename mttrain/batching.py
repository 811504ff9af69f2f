"""Which pairs form which batch in an epoch: a pure function of (seed, epoch, lengths, weights).

    B batches   N places in the epoch (pairs, repeated ones counted each time)

Pairs are sorted into buckets by their longer side, in a bucket by the difference of the sides with
a little noise (back and forth, so that neighbours stay alike), cut where a batch would pass its
budget, and the batches are shuffled. Each epoch draws how wide the buckets are and where they
begin: one length or two go together, another time others. Price: of 29,000 caption pairs (16
subwords a side) in batches of 4096 tokens, 4.5 % of the source and 3.2 % of the target is padding,
and of the pairs that share a batch 43 % share one again in the next epoch; with buckets of one
length it would be 3.8, 2.7 and 63 %. A plan takes two sorts of the pairs and no Python object for a
pair. Many pairs are planned in interleaved parts of at most a million, each as if it were all, and
the batches of all shuffled: what is sorted stays in the cache of the processor, so that time grows
as the pairs do. Each part is a sample of the whole corpus, and each epoch draws how many there are.

Random numbers are the raw 64-bit words of numpy's PCG64, seeded by SeedSequence((seed, epoch)).
Numpy promises those words for ever, but not what its `shuffle` and `permutation` make of them; so
orders are argsorts of the words, and a run resumed under another numpy sees the same batches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

Lengths = NDArray[np.int32] | NDArray[np.int64]

# Both measured, see above.
_NOISE = 0.05  # width of the noise on the difference of the sides, as a share of the longer side
_WIDEST = 1.4  # width of the widest buckets, in subwords; the narrowest have 1
_PART = 1 << 20  # pairs planned together


@dataclass(frozen=True, slots=True, eq=False)
class EpochPlan:
    """The batches of one epoch, in the order in which they are taken.

    order          [N] int64   pair numbers (0-based), those of a batch together
    begins, ends   [B] int64   batch i is order[begins[i]:ends[i]]; each place is in one of them
    source_tokens  [B] int64   source subwords of each batch, EOS counted, padding not
    target_tokens  [B] int64   the same of the target: the divisor of an update is a sum of these
    padding        share of padding in the cells of both sides together, 0 to 1
    """

    order: NDArray[np.int64]
    begins: NDArray[np.int64]
    ends: NDArray[np.int64]
    source_tokens: NDArray[np.int64]
    target_tokens: NDArray[np.int64]
    padding: float

    def __len__(self) -> int:
        return len(self.begins)

    def batch(self, position: int) -> NDArray[np.int64]:
        """Pair numbers of the batch at `position` (0-based)."""
        return self.order[self.begins[position] : self.ends[position]]

    def update_tokens(self, micro_batches: int, start: int = 0) -> NDArray[np.int64]:
        """Target tokens of each update that takes `micro_batches` batches, from batch `start` on.

        An update never reaches into the next epoch: when the number of batches is no multiple of
        `micro_batches`, the last update takes what is left and is divided by what it holds.
        `micro_batches` counts those of all ranks: accumulate x world size.
        """
        tokens = self.target_tokens[start:]
        if not len(tokens):
            return tokens
        return np.add.reduceat(tokens, np.arange(0, len(tokens), micro_batches))


def plan_epoch(
    seed: int,
    epoch: int,
    source_lengths: ArrayLike,
    target_lengths: ArrayLike,
    *,
    batch_tokens: int | None = None,
    batch_size: int | None = None,
    weights: ArrayLike | None = None,
) -> EpochPlan:
    """The plan of epoch `epoch` (0-based) for pairs with these lengths (subwords, EOS included).

    Exactly one of `batch_tokens` and `batch_size` is given. `batch_tokens` bounds rows x longest
    row of the source and of the target, each; a pair that is larger alone is a batch of one.
    `batch_size` bounds the rows. `weights` says how many times an epoch holds each pair: 2.3 stands
    for two times, and once more with probability 0.3. An epoch is never empty.
    """
    assert (batch_tokens is None) != (batch_size is None), "give batch_tokens or batch_size"
    source, target = _integers(source_lengths), _integers(target_lengths)
    assert len(source) == len(target) > 0, "one length per side, and at least one pair"
    words = np.random.PCG64(np.random.SeedSequence((seed, epoch)))
    pairs = None if weights is None else _repeat(words, len(source), weights)
    total = len(source) if pairs is None else len(pairs)
    order, tables, begin = np.empty(total, dtype=np.int64), [], 0
    count = _number_of_parts(words, total)
    for first in range(count):
        part = np.arange(first, total, count) if pairs is None else pairs[first::count]
        part = part[_by_length(words, source[part], target[part])]
        one, two = source[part], target[part]
        if batch_tokens is not None:
            starts = _cut(np.maximum(one, two), batch_tokens)
        else:
            starts = np.append(np.arange(0, len(part), batch_size or len(part)), len(part))
        order[begin : begin + len(part)] = part
        tables.append(_table(begin, starts, one, two))
        begin += len(part)
    table = np.concatenate(tables, axis=1)
    turn = np.argsort(words.random_raw(table.shape[1]), kind="stable")
    begins, ends, source_tokens, target_tokens, cells = table[:, turn]
    padding = 1.0 - int(source_tokens.sum() + target_tokens.sum()) / int(cells.sum())
    return EpochPlan(order, begins, ends, source_tokens, target_tokens, padding)


def mixing_weights(
    pairs: Sequence[int], weights: Sequence[float], temperature: float
) -> tuple[float, ...]:
    """How many times an epoch holds each corpus, when they are mixed by temperature T.

    Of corpora with n_i `pairs` and weights w_i, an epoch takes in proportion to w_i n_i^(1/T)
    (Devlin's multilingual BERT; Arivazhagan et al. 2019), and is as long as the weights alone would
    make it, sum of w_i n_i pairs: so T = 1 would give the weights. Exact on average over the
    epochs, whose draws are those of `plan_epoch`.
    """
    sizes, wanted = np.asarray(pairs, dtype=np.float64), np.asarray(weights, dtype=np.float64)
    shares = wanted * sizes ** (1.0 / temperature)
    total = (wanted * sizes).sum()
    times = np.divide(shares / shares.sum() * total, sizes, out=wanted.copy(), where=sizes > 0)
    return tuple(times.tolist())


class TokenBatchSampler:
    """Yields the pair numbers of each batch of one rank: `DataLoader(batch_sampler=...)`.

    Of the batches from the global position `start` on, rank r of W takes the r-th, the (r+W)-th and
    so on. Every rank yields equally often: one that has nothing left in the last round yields an
    empty list, for which the loader's `collate` makes a batch of weight zero. So nothing is cut,
    repeated or waited for.

    `plan_of(epoch)` gives the plan. The sampler lives in the parent process; loader workers only
    receive pair numbers, so their count changes nothing, and workers kept over epochs follow
    `set_position`.
    """

    def __init__(self, plan_of: Callable[[int], EpochPlan], *, rank: int = 0, world: int = 1):
        assert 0 <= rank < world, f"rank {rank} of {world}"
        self._plan_of, self.rank, self.world = plan_of, rank, world
        self._plan: EpochPlan | None = None
        self.epoch, self.start = 0, 0

    def set_position(self, epoch: int, start: int = 0) -> None:
        """Next iteration: epoch `epoch`, after `start` batches of it (all ranks) were taken."""
        if epoch != self.epoch:
            self._plan = None
        self.epoch, self.start = epoch, start

    @property
    def plan(self) -> EpochPlan:
        """The plan of the current epoch, made on first use."""
        if self._plan is None:
            self._plan = self._plan_of(self.epoch)
        return self._plan

    def __len__(self) -> int:
        return -(-max(0, len(self.plan) - self.start) // self.world)

    def __iter__(self) -> Iterator[list[int]]:
        plan, first, rounds = self.plan, self.start + self.rank, len(self)
        for position in range(first, first + rounds * self.world, self.world):
            yield plan.batch(position).tolist() if position < len(plan) else []


def _integers(lengths: ArrayLike) -> Lengths:
    """As signed integers; those of 4 bytes stay what they are: half the memory."""
    array = np.asarray(lengths)
    return array if array.dtype == np.int32 else array.astype(np.int64, copy=False)


def _uniform(raw: NDArray[np.uint64]) -> NDArray[np.float64]:
    """Words as numbers in [0, 1): the upper 53 bits of each, which a float64 holds exactly."""
    return (raw >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _repeat(words: np.random.PCG64, count: int, weights: ArrayLike) -> NDArray[np.int64]:
    """Pair numbers of the epoch, each as often as its weight says; [N] int64, ascending."""
    pairs = np.arange(count, dtype=np.int64)
    wanted = np.asarray(weights, dtype=np.float64)
    assert wanted.shape == (count,) and (wanted > 0).all(), "one positive weight per pair"
    whole = np.floor(wanted)
    short = wanted - whole - _uniform(words.random_raw(count))  # above 0: one time more
    times = whole.astype(np.int64) + (short > 0)
    if not times.any():  # all weights small and no luck: an epoch still has one update
        times[np.argmax(short)] = 1
    return np.repeat(pairs, times)


def _number_of_parts(words: np.random.PCG64, total: int) -> int:
    """How many parts an epoch of so many places has: at least as many as hold them, at most twice.

    An epoch of one part takes no random word for it.
    """
    least = -(-total // _PART)
    return least + int(words.random_raw() % least) if least > 1 else 1


def _by_length(words: np.random.PCG64, source: Lengths, target: Lengths) -> NDArray[np.int64]:
    """Places sorted so that neighbours have like lengths on both sides; [N] int64.

    By bucket first, which is a radix sort of small numbers, and then bucket after bucket: several
    times faster than one sort by both, whose order it is, and most of it in memory for one bucket.
    """
    longer = np.maximum(source, target)
    raw: NDArray[np.uint64] = words.random_raw(len(longer) + 2)
    width, begin = _uniform(raw[:2])
    width = 1.0 + (_WIDEST - 1.0) * width
    numbers = np.floor(np.arange(int(longer.max()) + 1) / width + begin).astype(np.int64)
    small = np.uint16 if numbers[-1] < 1 << 16 else np.int64
    bucket = numbers.astype(small)[longer]
    del longer
    order = np.argsort(bucket, kind="stable").astype(np.int64, copy=False)
    ends = np.cumsum(np.bincount(bucket))
    for number in np.flatnonzero(np.diff(ends, prepend=0)).tolist():
        at = slice(int(ends[number - 1]) if number else 0, int(ends[number]))
        places = order[at]
        one, two = source[places], target[places]
        noise = _NOISE * np.maximum(one, two) * (_uniform(raw[2:][places]) - 0.5)
        difference = (one - two) + noise
        # Every other bucket runs backwards: a batch that spans two of them meets like differences.
        order[at] = places[_stable(difference if number % 2 == 0 else -difference)]
    return order


def _stable(values: NDArray[np.float64]) -> NDArray[np.int64]:
    """What a stable sort gives, by the faster kind, unless two are equal."""
    order = np.argsort(values)
    ordered = values[order]
    if (ordered[1:] == ordered[:-1]).any():
        order = np.argsort(values, kind="stable")
    return order.astype(np.int64, copy=False)


def _cut(longest: Lengths, budget: int) -> NDArray[np.int64]:
    """Boundaries [B+1] of the largest batches with rows x longest row <= budget, left to right.

    `longest` [N] is the longer side of each pair: both sides keep the budget when it does.
    rows x longest row grows with the rows, so each batch is one binary search.
    """
    starts = [0]
    while starts[-1] < len(longest):
        at = starts[-1]
        rows = max(1, budget // int(longest[at]))  # more would break the budget at the first row
        padded = np.maximum.accumulate(longest[at : at + rows])
        padded = padded * np.arange(1, len(padded) + 1)
        starts.append(at + max(1, int(np.searchsorted(padded, budget, side="right"))))
    return np.array(starts, dtype=np.int64)


def _table(
    begin: int, starts: NDArray[np.int64], source: Lengths, target: Lengths
) -> NDArray[np.int64]:
    """[5, B] of batches from place `begin` on: begins, ends, source and target tokens, cells.

    Lengths are given in the order of the batches; cells are tokens and padding of both sides.
    """
    at, rows, sides = starts[:-1], np.diff(starts), (source, target)
    tokens = [np.add.reduceat(lengths, at, dtype=np.int64) for lengths in sides]
    widths = sum(np.maximum.reduceat(lengths, at).astype(np.int64) for lengths in sides)
    return np.stack((at + begin, starts[1:] + begin, *tokens, widths * rows))
