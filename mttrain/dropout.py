"""Dropout whose masks are a function of (seed, update, global micro-batch, call site).

`bernoulli_` draws from one serial generator: on a CPU that is a fifth of a training step, and where
the generator stands depends on everything that drew before. Here a mask is a hash of a key and of
the element's index, so a resumed run and a recomputed forward pass see the same mask, and the
arithmetic is vectorised and threaded.

Price: about twelve passes over half as many 32-bit integers as there are elements, a fifth of what
`bernoulli_` costs on two AVX2 cores. The drop rate is rounded to a multiple of 2^-16.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

_MASK64 = (1 << 64) - 1
_GOLDEN = -1640531527  # 0x9E3779B9 as a signed 32-bit integer: 2^32 / golden ratio, Knuth's hash
_counters: dict[torch.device, Tensor] = {}


def mix64(*values: int) -> int:
    """Hash integers into 64 bits: the finaliser of splitmix64 (Steele et al. 2014) after each."""
    state = 0
    for value in values:
        state = (state + value + 0x9E3779B97F4A7C15) & _MASK64
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK64
        state ^= state >> 31
    return state


def _signed32(value: int) -> int:
    value &= 0xFFFFFFFF
    return value - (1 << 32) if value >= 1 << 31 else value


def _counter(length: int, device: torch.device) -> Tensor:
    """`length` multiples of the golden ratio, int32; kept between calls and grown when needed."""
    kept = _counters.get(device)
    if kept is None or kept.numel() < length:
        kept = torch.arange(length, dtype=torch.int32, device=device).mul_(_GOLDEN)
        _counters[device] = kept
    return kept[:length]


def keep_mask(count: int, rate: float, key: int, device: torch.device) -> Tensor:
    """Boolean mask [count], False with probability `rate` (to 2^-16); a function of `key` alone.

    Two rounds of the xor-shift-multiply hash "lowbias32" (C. Wellons, Hash Function Prospector
    2018) over 32-bit counters; each 32-bit word gives two 16-bit draws.
    """
    word = _counter((count + 1) // 2, device) + _signed32(key)
    word ^= word >> 16
    word ^= _signed32(key >> 32)
    word *= 0x2C1B3C6D
    word ^= word >> 12
    word *= 0x297A2D39
    # The last shift must be a logical one: an arithmetic shift would clear the top bit.
    word ^= (word >> 15).bitwise_and_(0x1FFFF)
    return word.view(torch.int16)[:count] >= round(rate * 65536) - 32768


class DropoutKeys:
    """The key of the running forward pass, shared by all `KeyedDropout` of one model.

    `set` is called once before each training forward; `next_site` numbers the call sites when the
    model is built, so that no two of them share a mask.
    """

    def __init__(self) -> None:
        self.base = 0
        self.sites = 0

    def set(self, seed: int, update: int, micro_batch: int) -> None:
        """Choose the masks of one forward pass; `micro_batch` counts those of all ranks."""
        self.base = mix64(seed, update, micro_batch)

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

    def forward(self, x: Tensor) -> Tensor:
        """x [...] -> [...]"""
        if not self.training or self.rate == 0.0:
            return x
        mask = keep_mask(x.numel(), self.rate, mix64(self.keys.base, self.site), x.device)
        return x * mask.view(x.shape).to(x.dtype).mul_(1.0 / (1.0 - self.rate))

    def extra_repr(self) -> str:
        return f"rate={self.rate}"
