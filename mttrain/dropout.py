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


# ---- for the compiler -------------------------------------------------------------------------


def _mixed(state: Tensor, value: Tensor | int) -> Tensor:
    """One round of `mix64` on int64 words, which wrap around as unsigned ones do."""
    state = state + value + _signed(0x9E3779B97F4A7C15)
    state = (state ^ _shifted(state, 30)) * _signed(0xBF58476D1CE4E5B9)
    state = (state ^ _shifted(state, 27)) * _signed(0x94D049BB133111EB)
    return state ^ _shifted(state, 31)


def _signed(word: int) -> int:
    return word - (1 << 64) if word >> 63 else word


def _shifted(word: Tensor, bits: int) -> Tensor:
    return (word >> bits) & ((1 << (64 - bits)) - 1)


def traced_mask(shape: torch.Size, rate: float, key: Tensor, like: Tensor) -> Tensor:
    """`scaled_mask` in operations that torch.compile can join with others; key: int64 [].

    The key is a tensor, since a number would be compiled into the code.
    """
    first, second = _tables_on(like.device)
    position = torch.arange(math.prod(shape), device=like.device)
    block = torch.arange((position.shape[0] >> 20) + 1, device=like.device)
    further = _mixed(_mixed(torch.zeros_like(block), key), block)
    place = torch.where(block == 0, key, further)[position >> 20]
    inside = position & (_BLOCK - 1)
    one, two = (place & (_BLOCK - 1)) + inside, ((place >> 32) & (_BLOCK - 1)) + inside
    kept = (first[one] ^ second[two]) >= round(rate * 65536) - 32768
    return (kept.float() * (1.0 / (1.0 - rate))).view(shape).to(like.dtype)


# ---- modules ----------------------------------------------------------------------------------


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
        # In the type of the residual, as in backward: 1 / (1 - rate) is rounded in bfloat16.
        return torch.addcmul(residual, x, scaled_mask(x.shape, rate, key, residual))

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
        self._words: Tensor | None = None

    def set(self, seed: int, update: int, micro_batch: int, part: int = 0) -> None:
        """Choose the masks of one forward pass.

        micro_batch counts those of all ranks; part: which part of the micro-batch is computed.
        """
        self.base = mix64(seed, update, micro_batch, part)
        if self._words is not None:
            words = torch.tensor([self.of_site(site) for site in range(self.sites + 1)])
            if self._words.is_cuda:
                words = words.pin_memory()
            self._words.copy_(words, non_blocking=True)

    def of_site(self, site: int) -> int:
        """The key of a call site in the running forward pass: 63 bits, as a C integer holds."""
        return mix64(self.base, site) >> 1

    def hand_to(self, model: nn.Module, device: torch.device) -> None:
        """Keep the keys on the device too, for the compiled code of the model's call sites."""
        _tables_on(device)
        self._words = torch.zeros(self.sites + 1, dtype=torch.int64, device=device)
        for module in model.modules():
            if isinstance(module, KeyedDropout):
                module.word = self._words[module.site]

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
        self.word: Tensor | None = None  # the key as a tensor, where compiled code runs

    @property
    def active(self) -> bool:
        """Whether anything is dropped now."""
        return self.training and self.rate > 0.0

    @property
    def key(self) -> int:
        """What the mask of the running forward pass is made from."""
        return self.keys.of_site(self.site)

    def forward(self, x: Tensor) -> Tensor:
        """x [...] -> [...]"""
        if not self.active:
            return x
        if torch.compiler.is_compiling():
            assert self.word is not None
            return x * traced_mask(x.shape, self.rate, self.word, x)
        out: Tensor = _Dropout.apply(x, self.rate, self.key)  # type: ignore[no-untyped-call]
        return out

    def add(self, residual: Tensor, x: Tensor) -> Tensor:
        """residual + self(x): a residual connection, both [...]"""
        if not self.active or torch.compiler.is_compiling():
            total: Tensor = residual + self(x)
            return total
        out: Tensor = _DropoutAdd.apply(residual, x, self.rate, self.key)  # type: ignore[no-untyped-call]
        return out

    def rows(self, x: Tensor) -> Tensor:
        """x [..., D] -> [..., D]: whole rows are dropped or kept."""
        if not self.active:
            return x
        return x * scaled_mask(torch.Size((*x.shape[:-1], 1)), self.rate, self.key, x)
