"""Attention masks: boolean where they are made (True = may attend), additive where used."""

from __future__ import annotations

import torch
from torch import Tensor


def mask_bias(allowed: Tensor, dtype: torch.dtype) -> Tensor:
    """Additive attention bias from a boolean mask: 0 where True, very negative where False.

    Half of the type's lowest value: finite, so a row that may attend to nothing gives finite
    numbers and no NaN, and adding a score cannot overflow it to minus infinity.
    """
    bias = torch.zeros(allowed.shape, dtype=dtype, device=allowed.device)
    return bias.masked_fill_(~allowed, torch.finfo(dtype).min / 2)


def causal_mask(length: int, device: torch.device) -> Tensor:
    """Boolean [T, T]: position t may attend to positions 0 .. t."""
    return torch.ones(length, length, dtype=torch.bool, device=device).tril_()
