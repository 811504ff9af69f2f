"""Keyed dropout: rate, independence, reproducibility."""

from __future__ import annotations

import pytest
import torch

from mttrain.dropout import (
    DropoutKeys,
    KeyedDropout,
    keep_mask,
    mix64,
    scaled_mask,
    traced_mask,
)

CPU = torch.device("cpu")


@pytest.mark.parametrize("rate", [0.1, 0.3, 0.5, 0.9])
def test_rate_is_the_asked_one(rate: float) -> None:
    """An arithmetic shift in the hash once cleared the top bit and doubled the keep rate."""
    count = 3_000_000  # more than one block
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
    rows = module.rows(x)
    assert all(len(row.unique()) == 1 for row in rows)
    assert rows[:, 0].unique().tolist() == [0.0, pytest.approx(1 / 0.75)]
    module.eval()
    assert module(x) is x
    assert module.rows(x) is x


def test_masks_of_many_keys_share_nothing() -> None:
    """Windows of fixed tables: two masks must not be one mask, moved by some places."""
    count = 1 << 16
    transformed = []
    for update in range(24):
        mask = keep_mask(count, 0.5, mix64(3, update), CPU).double() * 2 - 1
        transformed.append(torch.fft.rfft(mask))
    limit = 7 * count**0.5  # of a sum of `count` signs; some 18 million of them are looked at
    for i, first in enumerate(transformed):
        for second in transformed[i + 1 :]:
            at_all_shifts = torch.fft.irfft(first * second.conj(), n=count)
            assert at_all_shifts.abs().max().item() < limit


def test_blocks_of_one_mask_differ() -> None:
    mask = keep_mask(1 << 21, 0.5, 9, CPU)
    first, second = mask.view(2, -1)
    assert not torch.equal(first, second)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_residual_sum_in_one_pass_is_the_sum_and_has_its_gradients(dtype: torch.dtype) -> None:
    """Backward makes the mask again from the key: it must be the mask of forward."""
    keys = DropoutKeys()
    module = KeyedDropout(0.3, keys)
    keys.set(1, 2, 3, 4)
    residual = torch.randn(7, 50, requires_grad=True)
    x = torch.randn(7, 50, dtype=dtype, requires_grad=True)
    weight = torch.randn(7, 50)
    fused = module.add(residual, x)
    plain = residual + module(x)
    accuracy = 2e-2 if dtype == torch.bfloat16 else 1e-6
    torch.testing.assert_close(fused, plain, rtol=accuracy, atol=accuracy, check_dtype=False)
    ours = torch.autograd.grad((fused * weight).sum(), (residual, x))
    theirs = torch.autograd.grad((plain * weight).sum(), (residual, x))
    for one, other in zip(ours, theirs, strict=True):
        assert one.dtype == other.dtype
        torch.testing.assert_close(one, other)


def test_keys_fit_a_signed_integer() -> None:
    """A key of 64 bits once stopped every run under the profiler, which records arguments."""
    keys = DropoutKeys()
    module = KeyedDropout(0.3, keys)
    for update in range(50):
        keys.set(1, update, 0)
        assert 0 <= module.key < 1 << 63


@pytest.mark.parametrize("count", [1, 1000, (1 << 20) + 1, 3 * (1 << 20) + 5])
def test_compiled_code_draws_the_same_mask(count: int) -> None:
    """The hash in int64 operations, where words above 2^63 are negative: an arithmetic shift for a
    logical one would change every block but the first."""
    like = torch.zeros(())
    for seed in range(5):
        key = mix64(seed, 9) >> 1
        wanted = scaled_mask(torch.Size((count,)), 0.3, key, like)
        assert torch.equal(traced_mask(torch.Size((count,)), 0.3, torch.tensor(key), like), wanted)
