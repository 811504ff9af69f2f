"""Keyed dropout: rate, independence, reproducibility."""

from __future__ import annotations

import pytest
import torch

from mttrain.dropout import DropoutKeys, KeyedDropout, keep_mask, mix64

CPU = torch.device("cpu")


@pytest.mark.parametrize("rate", [0.1, 0.3, 0.5, 0.9])
def test_rate_is_the_asked_one(rate: float) -> None:
    """An arithmetic shift in the hash once cleared the top bit and doubled the keep rate."""
    count = 1_000_000
    kept = keep_mask(count, rate, mix64(1, 2), CPU).double().mean().item()
    # Five standard deviations of a binomial share.
    assert abs(kept - (1 - rate)) < 5 * (rate * (1 - rate) / count) ** 0.5 + 2**-16


def test_bits_are_balanced_and_uncorrelated_between_keys_and_neighbours() -> None:
    """Masks of two sites, two updates or neighbouring elements must not resemble each other."""
    count = 400_000
    masks = [
        keep_mask(count, 0.5, mix64(7, update, site), CPU).double() * 2 - 1
        for update in (1, 2)
        for site in (1, 2, 3)
    ]
    limit = 5 / count**0.5
    for i, first in enumerate(masks):
        for second in masks[i + 1 :]:
            assert abs((first * second).mean().item()) < limit
        for lag in (1, 2, 3, 128, 512):
            assert abs((first[:-lag] * first[lag:]).mean().item()) < limit


def test_mask_depends_on_the_key_alone() -> None:
    """The global generator and earlier, longer masks must not change a mask (exact resume)."""
    first = keep_mask(1001, 0.3, 42, CPU)
    torch.manual_seed(5)
    keep_mask(50_000, 0.3, 43, CPU)
    assert torch.equal(first, keep_mask(1001, 0.3, 42, CPU))
    assert not torch.equal(first, keep_mask(1001, 0.3, 43, CPU))


def test_module_scales_and_repeats_and_is_off_in_evaluation() -> None:
    """M13: dropout must be off in evaluation; in training one key gives one mask."""
    keys = DropoutKeys()
    module, other = KeyedDropout(0.25, keys), KeyedDropout(0.25, keys)
    x = torch.ones(64, 33)
    keys.set(seed=1, update=10, micro_batch=0)
    first = module(x)
    assert first.unique().tolist() == [0.0, pytest.approx(1 / 0.75)]
    assert torch.equal(first, module(x))
    assert not torch.equal(first, other(x))
    keys.set(seed=1, update=11, micro_batch=0)
    assert not torch.equal(first, module(x))
    module.eval()
    assert module(x) is x
