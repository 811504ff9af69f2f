"""Epoch plans against arithmetic: budgets, coverage, order, weights, ranks, accumulation groups."""

from __future__ import annotations

import itertools
import subprocess
import sys
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mttrain.batching import EpochPlan, TokenBatchSampler, _stable, mixing_weights, plan_epoch


def lengths(count: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Caption-like lengths: about 16 subwords a side, the sides correlated at 0.87."""
    rng = np.random.default_rng(seed)
    source = np.clip(np.exp(rng.normal(2.7, 0.32, count)), 3, 60).astype(np.int32)
    target = np.clip(source * np.exp(rng.normal(0.04, 0.17, count)), 3, 60).astype(np.int32)
    return source, target


def batches(plan: EpochPlan) -> list[list[int]]:
    return [plan.batch(i).tolist() for i in range(len(plan))]


pairs_of_lengths = st.lists(
    st.tuples(st.integers(1, 60), st.integers(1, 60)), min_size=1, max_size=80
)


@given(
    pairs_of_lengths,
    st.integers(1, 200),
    st.integers(0, 2**63),
    st.integers(0, 1000),
    st.sampled_from([2, 7, 1 << 20]),
)
def test_budget_holds_on_both_sides_and_every_pair_comes_once(
    pairs: list[tuple[int, int]], budget: int, seed: int, epoch: int, part: int
) -> None:
    """D04, D05, D06: a batch that passes the budget once padded, a pair lost in the tail, or an
    empty batch for a pair that is larger than the budget; planned at once or in parts."""
    source, target = np.array(pairs).T
    with patch("mttrain.batching._PART", part):
        plan = plan_epoch(seed, epoch, source, target, batch_tokens=budget)
    cells = sum(len(b) * (max(source[b]) + max(target[b])) for b in batches(plan))
    assert plan.padding == pytest.approx(1 - (source.sum() + target.sum()) / cells)
    assert sorted(plan.order) == list(range(len(pairs)))
    for number, batch in enumerate(batches(plan)):
        assert batch, "a batch without rows"
        padded = len(batch) * max(max(source[i], target[i]) for i in batch)
        assert padded <= budget or len(batch) == 1
        assert plan.source_tokens[number] == sum(source[i] for i in batch)
        assert plan.target_tokens[number] == sum(target[i] for i in batch)


def test_mixed_lengths_stay_inside_a_small_budget() -> None:
    """D04: one pair of 200 among many of 3 made batches of far more cells than the budget says."""
    source = np.array([3] * 400 + [200] + [3] * 50)
    target = np.array([3] * 400 + [4] + [200] * 2 + [3] * 48)
    plan = plan_epoch(1, 0, source, target, batch_tokens=512)
    for batch in batches(plan):
        assert len(batch) * source[batch].max() <= 512
        assert len(batch) * target[batch].max() <= 512
    assert max(len(batch) for batch in batches(plan)) == 512 // 3  # and it is used to the full


def test_pair_larger_than_the_budget_is_a_batch_of_one() -> None:
    """D05: 16 tokens // 40 gave zero rows, and an endless loop."""
    plan = plan_epoch(1, 0, [5, 40, 5, 5], [5, 4, 40, 5], batch_tokens=16)
    assert sorted(batches(plan), key=lambda batch: (len(batch), batch))[:2] == [[1], [2]]


def test_batches_cannot_take_another_pair() -> None:
    """A cut that is too timid wastes the budget: no two neighbours of a sorted run fit together."""
    source, target = np.full(100, 7), np.full(100, 5)
    plan = plan_epoch(3, 0, source, target, batch_tokens=64)
    assert sorted(plan.ends - plan.begins) == [1, *[9] * 11]


def test_fixed_number_of_sentences() -> None:
    """D06: 10 pairs in batches of 4 were two batches, and two pairs were never seen."""
    source, target = lengths(10)
    plan = plan_epoch(1, 0, source, target, batch_size=4)
    assert sorted(plan.ends - plan.begins) == [2, 4, 4]
    assert sorted(plan.order) == list(range(10))


def test_epochs_differ_and_come_again_with_the_seed() -> None:
    """D09, R19: the generator was set to the same value in each epoch; seed 0 meant "no seed"."""
    source, target = lengths(100)
    for seed in (0, 1):
        first, again = (
            [plan_epoch(seed, e, source, target, batch_tokens=128).order.tolist() for e in range(3)]
            for _ in range(2)
        )
        assert first == again
        assert all(a != b for a, b in itertools.combinations(first, 2))
    other = [plan_epoch(s, 0, source, target, batch_tokens=128).order.tolist() for s in range(3)]
    assert all(a != b for a, b in itertools.combinations(other, 2))


def test_companions_change_and_padding_stays_low() -> None:
    """D09: sorting by length alone gives each pair the same companions in every epoch; shuffling
    alone pads 40 % of the cells."""
    source, target = lengths(29_000)
    plans = [plan_epoch(1, epoch, source, target, batch_tokens=4096) for epoch in range(4)]
    for plan in plans:
        cells = np.zeros(2, dtype=np.int64)
        for batch in batches(plan):
            cells += [len(batch) * int(side[batch].max()) for side in (source, target)]
        tokens = np.array([source.sum(), target.sum()])
        assert plan.padding == pytest.approx(1 - tokens.sum() / cells.sum())
        assert (1 - tokens / cells < 0.05).all()
    batch_of = []
    for plan in plans[:2]:
        where = np.empty(len(source), dtype=np.int64)
        for number, batch in enumerate(batches(plan)):
            where[batch] = number
        batch_of.append(where)
    shared = [
        np.bincount(batch_of[1][plans[0].batch(i)]).max() / len(plans[0].batch(i))
        for i in range(len(plans[0]))
    ]
    assert np.mean(shared) < 0.6, "more than half of a batch meets again in one batch"


def test_short_and_long_batches_are_mixed() -> None:
    """Batches in order of length make the first updates of an epoch see short sentences only."""
    source, target = lengths(5000)
    plan = plan_epoch(1, 0, source, target, batch_tokens=512)
    longest = [int(source[batch].max()) for batch in batches(plan)]
    half = len(longest) // 2
    assert abs(np.mean(longest[:half]) - np.mean(longest[half:])) < 3
    assert longest != sorted(longest)


def test_plan_is_the_same_in_another_process() -> None:
    """D08, R19: an order that hangs on hash seeds or global generators is lost on resume."""
    code = (
        "import numpy as np; np.random.seed(5); from mttrain.batching import plan_epoch;"
        "l = np.arange(300) % 37 + 1;"
        "print(plan_epoch(7, 2, l, l[::-1], batch_tokens=100).order.tolist())"
    )
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout
    both = np.arange(300) % 37 + 1
    plan = plan_epoch(7, 2, both, both[::-1], batch_tokens=100)
    assert printed == f"{plan.order.tolist()}\n"


def test_weights_repeat_and_thin_out_pairs() -> None:
    """A weight of 2.25 is two times, and a third time in a quarter of the epochs, not of the pairs
    for ever; a weight of 0.5 takes another half each epoch."""
    weights = np.repeat([1.0, 2.25, 0.5], 400)
    source, target = lengths(1200)
    counts = np.array(
        [
            np.bincount(
                plan_epoch(1, epoch, source, target, batch_tokens=256, weights=weights).order,
                minlength=1200,
            )
            for epoch in range(8)
        ]
    )
    assert (counts[:, :400] == 1).all()
    assert set(counts[:, 400:800].ravel()) == {2, 3}
    assert counts[:, 400:800].mean() == pytest.approx(2.25, abs=0.03)
    assert counts[:, 800:].mean() == pytest.approx(0.5, abs=0.05)
    assert (counts[0] != counts[1]).any()
    # 8 independent draws at 1/2: all or none of them in 2 of 256 pairs, so about 3 of 400
    assert (counts[:, 800:].sum(axis=0) % 8 == 0).sum() < 20


def test_tiny_weights_still_give_an_epoch() -> None:
    """D06: 3 pairs of weight 0.001 drew nothing, and the trainer went round empty epochs."""
    for epoch in range(20):
        plan = plan_epoch(1, epoch, [4] * 3, [4] * 3, batch_tokens=64, weights=[0.001] * 3)
        assert len(plan.order) >= 1 and len(plan) == 1


def sampler(plan: EpochPlan, rank: int, world: int, start: int = 0) -> TokenBatchSampler:
    made = TokenBatchSampler(lambda epoch: plan, rank=rank, world=world)
    made.set_position(0, start)
    return made


@given(st.integers(1, 5), st.integers(1, 40), st.integers(0, 45))
def test_ranks_share_the_batches(world: int, count: int, start: int) -> None:
    """R18, D06, D10: a rank with a batch fewer leaves the others waiting; cutting or repeating the
    tail to even it out loses pairs or counts them twice."""
    plan = plan_epoch(1, 0, np.full(count, 5), np.full(count, 5), batch_tokens=5)
    assert len(plan) == count
    ranks = [list(sampler(plan, rank, world, start)) for rank in range(world)]
    assert len({len(taken) for taken in ranks}) == 1
    assert (
        len(ranks[0]) == len(sampler(plan, 0, world, start)) == -(-max(0, count - start) // world)
    )
    rounds = list(itertools.chain.from_iterable(zip(*ranks, strict=True)))
    wanted = batches(plan)[start:]
    assert rounds[: len(wanted)] == wanted
    assert rounds[len(wanted) :] == [[]] * (len(rounds) - len(wanted))


def test_resumed_order_is_the_rest_of_the_epoch() -> None:
    """D08: a run that stopped in mid-epoch replayed the epoch from its start."""
    source, target = lengths(500)

    def plan_of(epoch: int) -> EpochPlan:
        return plan_epoch(4, epoch, source, target, batch_tokens=200)

    straight = TokenBatchSampler(plan_of)
    seen = []
    for epoch in range(3):
        straight.set_position(epoch)
        seen += list(straight)
    resumed = TokenBatchSampler(plan_of)
    resumed.set_position(1, 7)
    rest = list(resumed)
    resumed.set_position(2)
    rest += list(resumed)
    assert rest == seen[len(plan_of(0)) + 7 :]


def test_last_group_of_an_epoch_is_divided_by_what_it_holds() -> None:
    """M10, D06: of 7 batches at accumulate 4 the last three were scaled as if they were four, or
    leaked into the next epoch; 3 pairs at accumulate 8 trained on nothing."""
    source, target = lengths(7)
    plan = plan_epoch(1, 0, source, target, batch_size=1)
    tokens = plan.target_tokens.tolist()
    assert plan.update_tokens(4).tolist() == [sum(tokens[:4]), sum(tokens[4:])]
    assert plan.update_tokens(4, start=4).tolist() == [sum(tokens[4:])]
    assert plan.update_tokens(8).tolist() == [sum(target)]
    assert plan.update_tokens(1).tolist() == tokens
    assert plan.update_tokens(4, start=7).tolist() == []
    # Two ranks: an update of accumulate 2 takes the same four batches, two on each rank.
    ranks = [list(sampler(plan, rank, 2)) for rank in range(2)]
    for update in range(2):
        taken = [i for rank in ranks for batch in rank[2 * update : 2 * update + 2] for i in batch]
        assert target[taken].sum() == plan.update_tokens(4)[update]


@pytest.mark.parametrize("longest", [1, 3, 200])
@pytest.mark.parametrize("kind", [np.int32, np.int64])
def test_order_is_that_of_one_sort(longest: int, kind: type) -> None:
    """A faster sort that leaves the order of the two keys would give a resumed run other batches
    than those it began with."""
    generator = np.random.default_rng(longest)
    source = generator.integers(1, longest + 1, 5000).astype(kind)
    target = np.clip(source + generator.integers(-2, 3, 5000), 1, longest).astype(kind)
    for epoch in range(3):
        words = np.random.PCG64(np.random.SeedSequence((7, epoch)))
        drawn = (words.random_raw(5002) >> np.uint64(11)).astype(np.float64) * 2.0**-53
        longer = np.maximum(source, target).astype(np.int64)
        bucket = np.floor(longer / (1.0 + (1.4 - 1.0) * drawn[0]) + drawn[1])
        difference = (source - target) + 0.05 * longer * (drawn[2:] - 0.5)
        wanted = np.lexsort((np.where(bucket % 2 == 0, difference, -difference), bucket))
        plan = plan_epoch(7, epoch, source, target, batch_size=5000)  # one batch: not shuffled
        np.testing.assert_array_equal(plan.order, wanted)


def test_equal_values_keep_their_order() -> None:
    """Of pairs that differ in nothing a fast sort may put any first."""
    generator = np.random.default_rng(0)
    for values in (generator.integers(0, 9, 3000).astype(np.float64), np.array([0.0, -0.0] * 99)):
        np.testing.assert_array_equal(_stable(values), np.argsort(values, kind="stable"))


def test_plan_makes_no_object_for_a_pair() -> None:
    """D13: lists of a million Python integers are copied page by page into forked workers."""
    source, target = lengths(200_000)
    plan = plan_epoch(1, 0, source, target, batch_tokens=25_000)
    arrays = (plan.order, plan.begins, plan.ends, plan.source_tokens, plan.target_tokens)
    assert all(array.dtype == np.int64 for array in arrays)
    assert len(plan.order) == 200_000 and max(plan.ends) == 200_000


def test_parts_are_samples_of_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts that are runs of the corpus would never put its first file beside its last; a fixed
    number of them would part two pairs for ever."""
    monkeypatch.setattr("mttrain.batching._PART", 1000)
    source, target = lengths(8000)
    numbers = set()
    for epoch in range(12):
        plan = plan_epoch(1, epoch, source, target, batch_tokens=512)
        shares = [np.mean(np.array(batch) < 4000) for batch in batches(plan) if len(batch) >= 16]
        assert 0.45 < np.mean(shares) < 0.55 and np.std(shares) < 0.15
        batch = np.sort(plan.batch(int(np.argmax(plan.ends - plan.begins))))
        numbers.add(int(np.gcd.reduce(np.diff(batch))))
        assert plan.padding < 0.12
    assert numbers <= set(range(8, 16)) and len(numbers) > 3


# ---- mixing -----------------------------------------------------------------------------------


def test_proportions_of_a_mixture() -> None:
    """n^(1/T), not n^T nor n/T; and the limits: T = 1 keeps the weights, a high T evens out."""
    sizes, weights = [1000, 10, 100], [1.0, 2.0, 1.0]
    for temperature in (1.0, 1.43, 5.0, 100.0):
        times = mixing_weights(sizes, weights, temperature)
        counts = [size * one for size, one in zip(sizes, times, strict=True)]
        powers = [w * n ** (1 / temperature) for n, w in zip(sizes, weights, strict=True)]
        assert [c / counts[0] for c in counts] == pytest.approx([p / powers[0] for p in powers])
        assert sum(counts) == pytest.approx(1000 + 20 + 100)
    assert mixing_weights(sizes, weights, 1.0) == pytest.approx(weights)
    assert mixing_weights([10, 0], [1.0, 1.0], 5.0)[0] == pytest.approx(1.0)


def test_a_mixture_over_many_epochs() -> None:
    """Fractions drawn with another probability shift the mixture in every epoch: the counts must be
    those of the proportion, within five standard deviations of the draws."""
    sizes = [300, 20]
    times = mixing_weights(sizes, [1.0, 1.0], 2.0)
    source = np.full(320, 5)
    weights = np.repeat(times, sizes)
    epochs = 400
    counts = np.zeros(2)
    for epoch in range(epochs):
        order = plan_epoch(7, epoch, source, source, batch_size=50, weights=weights).order
        counts += (order < 300).sum(), (order >= 300).sum()
    share = 300**0.5 / (300**0.5 + 20**0.5)
    expected = np.array([320 * share, 320 * (1 - share)])
    fractions = np.array(times) % 1
    deviation = np.sqrt(np.array(sizes) * fractions * (1 - fractions) / epochs)
    assert (abs(counts / epochs - expected) < 5 * deviation).all()
