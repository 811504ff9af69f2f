"""Random numbers that are no stream: 64-bit hashes of whatever a number belongs to.

Each ingredient is mixed in by the finaliser of splitmix64 (Steele, Lea and Flood 2014, "Fast
Splittable Pseudorandom Number Generators"). So a draw depends on its own seed, line or word and
step alone, never on what was drawn before or beside it. Some nanoseconds a number.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Keys = npt.NDArray[np.uint64]

# The three constants of splitmix64.
_GOLDEN, _FIRST, _SECOND = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


def absorb(keys: Keys, value: Keys) -> Keys:
    """Hash `value` into `keys`; both uint64, arithmetic modulo 2^64."""
    mixed = (keys ^ value) + np.uint64(_GOLDEN)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(_FIRST)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(_SECOND)
    return mixed ^ (mixed >> np.uint64(31))


def as_keys(values: Sequence[int]) -> Keys:
    """Any whole numbers, modulo 2^64."""
    return np.array([value % 2**64 for value in values], dtype=np.uint64)
