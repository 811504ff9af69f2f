"""What decoding keeps between two steps: keys and values of the past, without moving them.

When beams change places, the usual way is to copy the whole cache in the new order, at every step.
Here the positions of all beams of a sentence stay where they were written and lie in one attention;
a mask tells each row which of them are its own past, and only that mask is reordered.

Price: a row's scores span K times as many positions as it has (K = beam), which for the short
sequences of translation costs less than the copies. Sentences that leave the batch are dropped by a
copy.

Shapes: N = G sentences x K rows (`group`), H heads, E head width, L layers, S source length,
t positions done.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor

from mttrain.masks import causal_mask, mask_bias

CACHE_STEP = 32  # target positions by which the key/value cache grows
# Fewest keys of an attention, masked where there are no more: over fewer the products and the
# softmax run number by number on a CPU.
LEAST_KEYS = 16


@dataclass(frozen=True)
class DecoderState:
    """What decoding keeps between two steps, for N = G sentences x K rows (`group`).

    cache [L, 2, G, H, capacity, K, E] keys and values of past positions; memory [L, 2, G, H, S, E]
    keys and values of the encoder output; memory_bias [G, 1, 1, S]; slots [N, capacity*K]: additive
    bias of what each row may attend to among the positions of all rows of its sentence, 0 at its
    own past; length: positions done. S and capacity*K are LEAST_KEYS or more.
    """

    cache: Tensor
    memory: Tensor
    memory_bias: Tensor
    slots: Tensor
    length: int
    group: int

    # ---- views for one step: position `length` is the current one -----------------------------

    def current(self) -> tuple[Tensor, ...]:
        """For each layer [2, G, H, K, E]: where the current position is written."""
        return self.cache[:, :, :, :, self.length].unbind(0)

    def past(self) -> list[tuple[Tensor, Tensor]]:
        """For each layer keys and values [G*H, T*K, E] of the positions up to the current one.

        T*K is LEAST_KEYS or more; what lies ahead is zero, and masked.
        """
        layers, _, sentences, heads, capacity, group, width = self.cache.shape
        flat = self.cache.view(2 * layers, sentences * heads, capacity * group, width)
        return _pairs(flat[:, :, : max(LEAST_KEYS, (self.length + 1) * group)])

    def sources(self) -> list[tuple[Tensor, Tensor]]:
        """For each layer keys and values [G*H, S, E] of the encoder output."""
        return _pairs(self.memory.flatten(2, 3).flatten(0, 1))

    def past_bias(self) -> Tensor | None:
        """[G|1, 1, K, T*K]: 0 at the own past of each row; None: all of it is."""
        if self.group == 1:
            if self.length + 1 >= LEAST_KEYS:
                return None
            return _reached(self.slots.dtype, self.slots.device)[self.length]
        own = self.slots[:, : max(LEAST_KEYS, (self.length + 1) * self.group)]
        return own.view(-1, 1, self.group, own.shape[1])

    # ---- from step to step --------------------------------------------------------------------

    def with_room(self) -> DecoderState:
        """The same state with a free position in the cache, its own rows marked in `slots`."""
        state, group = self, self.group
        if self.cache.shape[4] == self.length:
            cache = F.pad(self.cache, (0, 0, 0, 0, 0, CACHE_STEP))
            slots = F.pad(self.slots, (0, CACHE_STEP * group), value=_low(self.slots.dtype))
            state = replace(self, cache=cache, slots=slots)
        if group > 1:
            now = state.slots[:, self.length * group : (self.length + 1) * group]
            now.view(-1, group, group).copy_(_own(group, now.dtype, now.device))
        return state

    def reorder(self, rows: Tensor, kept: Tensor | None = None) -> DecoderState:
        """State whose row i is the old row rows[i], in equal groups of neighbours.

        kept [g]: the old sentences that the new groups continue, in their order; None: each as it
        stands. Keys and values stay where they are while the groups keep their size: only `slots`
        moves. Sentences that are gone are dropped from the cache.
        """
        state = self
        if self.group > 1:
            state = replace(state, slots=self.slots.index_select(0, rows))
        if kept is not None:
            state = replace(
                state,
                cache=self.cache.index_select(2, kept),
                memory=self.memory.index_select(2, kept),
                memory_bias=self.memory_bias.index_select(0, kept),
            )
        group = rows.shape[0] // max(state.memory_bias.shape[0], 1)
        return state if group == self.group else state._regrouped(group)

    def _regrouped(self, group: int) -> DecoderState:
        """Groups of another size: each row gets its own copy of its past."""
        layers, _, sentences, heads, capacity, old, width = self.cache.shape
        past = self.cache[:, :, :, :, : self.length]  # [L, 2, G, H, t, old K, E]
        rows = sentences * group
        if old == 1:
            mine = past.expand(-1, -1, -1, -1, -1, group, -1)
        else:
            own = self.slots.view(rows, capacity, old)[:, : self.length].argmax(2)  # [N, t]
            index = own.view(sentences, group, -1).transpose(1, 2)[None, None, :, None, :, :, None]
            mine = past.gather(5, index.expand(layers, 2, -1, heads, -1, -1, width))
        cache = _empty_cache(past, (layers, 2, sentences, heads, capacity, group, width))
        cache[:, :, :, :, : self.length] = mine
        slots = _own(group, self.slots.dtype, self.slots.device).repeat(sentences, capacity)
        slots[:, self.length * group :] = _low(slots.dtype)
        return replace(self, cache=cache, slots=slots, group=group)


def new_state(memory: Tensor, memory_bias: Tensor) -> DecoderState:
    """The state before the first position, one row a sentence, of memory [L, 2, G, H, S, E]."""
    layers, _, sentences, heads, length, width = memory.shape
    if length < LEAST_KEYS:
        more = LEAST_KEYS - length
        memory = F.pad(memory, (0, 0, 0, more))
        memory_bias = F.pad(memory_bias, (0, more), value=_low(memory_bias.dtype))
    cache = _empty_cache(memory, (layers, 2, sentences, heads, CACHE_STEP, 1, width))
    return DecoderState(cache, memory, memory_bias, memory_bias.new_empty((0, 0)), 0, 1)


def _empty_cache(like: Tensor, shape: tuple[int, ...]) -> Tensor:
    """A cache of that shape; what an attention may read before it is written is zero."""
    cache = like.new_empty(shape)
    cache[:, :, :, :, : -(-LEAST_KEYS // shape[5])] = 0.0
    return cache


@lru_cache(maxsize=64)
def _own(group: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Bias [K, K] that lets each row attend to what it wrote itself."""
    return mask_bias(torch.eye(group, dtype=torch.bool, device=device), dtype)


@lru_cache(maxsize=64)
def _reached(dtype: torch.dtype, device: torch.device) -> tuple[Tensor, ...]:
    """Bias [1, 1, 1, LEAST_KEYS] of each of the first positions of a group of one."""
    return mask_bias(causal_mask(LEAST_KEYS, device), dtype)[:, None, None, None].unbind(0)


def _low(dtype: torch.dtype) -> float:
    return torch.finfo(dtype).min / 2


def _pairs(flat: Tensor) -> list[tuple[Tensor, Tensor]]:
    """[2*L, ...], keys and values by turns -> one pair for each layer."""
    parts = flat.unbind(0)
    return list(zip(parts[0::2], parts[1::2], strict=True))
