"""Dropout whose masks are a function of (seed, update, global micro-batch, part, call site).

`bernoulli_` draws from one serial generator: on a CPU that is a fifth of a training step, and where
the generator stands depends on everything that drew before. Here a mask is a function of a key, so
a resumed run and a recomputed forward pass see the same mask, and backward makes it again instead
of keeping it.

A mask takes two windows, at places that its key chooses, of two fixed tables of random 16-bit
words, and drops where their exclusive or is below the rate. Words of one mask are independent; two
masks share some only when both windows are shifted by the same distance, one time in a million.

Price: two passes over 16-bit words, a twentieth of what `bernoulli_` costs on two AVX2 cores, and
8 MB for the tables. The drop rate is rounded to a multiple of 2^-16.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from mttrain.linear import roomy

_MASK64 = (1 << 64) - 1
_BLOCK = 1 << 20  # elements under one pair of windows; more take further pairs
_tables: dict[torch.device, tuple[Tensor, Tensor]] = {}


def mix64(*values: int) -> int:
    """Hash integers into 64 bits: the finaliser of splitmix64 (Steele et al. 2014) after each."""
    state = 0
    for value in values:
        state = (state + value + 0x9E3779B97F4A7C15) & _MASK64
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK64
        state ^= state >> 31
    return state


def _random_words(count: int, key: int) -> NDArray[np.int16]:
    """`count` uniform 16-bit words (a multiple of 2), the same on every machine.

    Two rounds of the xor-shift-multiply hash "lowbias32" (C. Wellons, Hash Function Prospector
    2018) over a counter times 2^32 / golden ratio; each 32-bit result gives two words.
    """
    word = np.arange(count // 2, dtype=np.uint32) * np.uint32(0x9E3779B9) + np.uint32(key)
    word ^= word >> np.uint32(16)
    word *= np.uint32(0x2C1B3C6D)
    word ^= word >> np.uint32(12)
    word *= np.uint32(0x297A2D39)
    word ^= word >> np.uint32(15)
    return word.astype("<u4", copy=False).view("<i2").astype(np.int16, copy=False)


def _tables_on(device: torch.device) -> tuple[Tensor, Tensor]:
    """The two tables [2 * _BLOCK], made once for each device."""
    if device not in _tables:
        first, second = (
            torch.from_numpy(_random_words(2 * _BLOCK, key)).to(device)
            for key in (0x243F6A88, 0x85A308D3)  # digits of pi
        )
        _tables[device] = (first, second)
    return _tables[device]


def keep_mask(count: int, rate: float, key: int, device: torch.device) -> Tensor:
    """float32 mask [count], 0 with probability `rate` (to 2^-16), else 1; a function of `key`."""
    first, second = _tables_on(device)
    mask = torch.empty(count, device=device)
    threshold = round(rate * 65536) - 32768
    for block, start in enumerate(range(0, count, _BLOCK)):
        part = mask[start : start + _BLOCK]
        place = key if block == 0 else mix64(key, block)
        one, two = place % _BLOCK, (place >> 32) % _BLOCK
        words = first[one : one + len(part)] ^ second[two : two + len(part)]
        torch.ge(words, threshold, out=part)
    return mask


def scaled_mask(shape: torch.Size, rate: float, key: int, like: Tensor) -> Tensor:
    """Mask of 0 and 1 / (1 - rate), of the shape, and of the type and device of `like`."""
    mask = keep_mask(math.prod(shape), rate, key, like.device).mul_(1.0 / (1.0 - rate))
    return mask.view(shape).to(like.dtype)


class _Dropout(torch.autograd.Function):
    """(x, rate, key) -> x * mask; backward makes the mask again."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, rate: float, key: int) -> Tensor:
        ctx.rate, ctx.key = rate, key
        return x * scaled_mask(x.shape, rate, key, x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return grad * scaled_mask(grad.shape, ctx.rate, ctx.key, grad), None, None


class _DropoutAdd(torch.autograd.Function):
    """(residual, x, rate, key) -> residual + x * mask, in one pass."""

    @staticmethod
    def forward(ctx: Any, residual: Tensor, x: Tensor, rate: float, key: int) -> Tensor:
        ctx.rate, ctx.key, ctx.dtype = rate, key, x.dtype
        return torch.addcmul(residual, x, scaled_mask(x.shape, rate, key, x))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        dropped = roomy(grad, *grad.shape)  # what made x may be a linear layer
        torch.mul(grad, scaled_mask(grad.shape, ctx.rate, ctx.key, grad), out=dropped)
        return grad, dropped.to(ctx.dtype), None, None


class DropoutKeys:
    """The key of the running forward pass, shared by all `KeyedDropout` of one model.

    `set` is called once before each training forward; `next_site` numbers the call sites when the
    model is built, so that no two of them share a mask.
    """

    def __init__(self) -> None:
        self.base = 0
        self.sites = 0

    def set(self, seed: int, update: int, micro_batch: int, part: int = 0) -> None:
        """Choose the masks of one forward pass.

        micro_batch counts those of all ranks; part: which part of the micro-batch is computed.
        """
        self.base = mix64(seed, update, micro_batch, part)

    def next_site(self) -> int:
        """A number for one more call site."""
        self.sites += 1
        return self.sites


class KeyedDropout(nn.Module):
    """Inverted dropout (Srivastava et al. 2014): drop with `rate`, scale the rest by 1/(1-rate).

    Does nothing in evaluation mode.
    """

    def __init__(self, rate: float, keys: DropoutKeys) -> None:
        super().__init__()
        self.rate = rate
        self.keys = keys
        self.site = keys.next_site()

    @property
    def active(self) -> bool:
        """Whether anything is dropped now."""
        return self.training and self.rate > 0.0

    @property
    def key(self) -> int:
        """What the mask of the running forward pass is made from: 63 bits, as a C integer holds."""
        return mix64(self.keys.base, self.site) >> 1

    def forward(self, x: Tensor) -> Tensor:
        """x [...] -> [...]"""
        if not self.active:
            return x
        out: Tensor = _Dropout.apply(x, self.rate, self.key)  # type: ignore[no-untyped-call]
        return out

    def add(self, residual: Tensor, x: Tensor) -> Tensor:
        """residual + self(x): a residual connection, both [...]"""
        if not self.active:
            return residual + x
        out: Tensor = _DropoutAdd.apply(residual, x, self.rate, self.key)  # type: ignore[no-untyped-call]
        return out

    def rows(self, x: Tensor) -> Tensor:
        """x [..., D] -> [..., D]: whole rows are dropped or kept."""
        if not self.active:
            return x
        return x * scaled_mask(torch.Size((*x.shape[:-1], 1)), self.rate, self.key, x)

    def extra_repr(self) -> str:
        return f"rate={self.rate}"
