"""What decoding keeps between two steps: keys and values of the past, without moving them.

When beams change places, the usual way is to copy the whole cache in the new order, at every step.
Here the positions of all beams of a sentence stay where they were written and lie in one attention;
a mask tells each row which of them are its own past, and only the table behind that mask, of small
integers, is reordered.

Price: a row's scores span K times as many positions as it has (K = beam), which for the short
sequences of translation costs less than the copies. Sentences that leave the batch are dropped by a
copy.

Shapes: N = G sentences x K rows (`group`), H heads, E head width, L layers, S source length,
t positions done.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from mttrain.masks import mask_bias

CACHE_STEP = 32  # target positions by which the key/value cache grows


@dataclass(frozen=True)
class DecoderState:
    """What decoding keeps between two steps, for N = G sentences x K rows (`group`).

    cache [L, 2, G, H, capacity, K, E] keys and values of past positions; slots [N, capacity]: the
    row of the sentence, 0 .. K-1, whose past a row continues at each position; memory: per layer
    the keys and values [G, H, S, E] of the encoder output; memory_bias [G, 1, 1, S]; fused: per
    layer the joined self-attention weights; length: positions done; past_bias [G, 1, K, T*K]: what
    each row may attend to among the T positions of all rows of its sentence.
    """

    cache: Tensor
    slots: Tensor
    memory: tuple[tuple[Tensor, Tensor], ...]
    memory_bias: Tensor
    fused: tuple[tuple[Tensor, Tensor], ...]
    length: int
    group: int
    past_bias: Tensor | None = None

    def past(self, layer: int) -> tuple[Tensor, Tensor]:
        """Keys and values [G, H, T*K, E] of the positions up to the current one."""
        both = self.cache[layer, :, :, :, : self.length + 1]
        keys, values = both.flatten(3, 4).unbind(0)
        return keys, values

    def reorder(self, rows: Tensor) -> DecoderState:
        """State whose row i is the old row rows[i]; rows may repeat, grow or shrink.

        Rows of one sentence must stay adjacent. While they stay K for each, keys and values stay
        where they are: only `slots` moves. Sentences that are gone are dropped from the cache.
        """
        sentence = torch.div(rows, self.group, rounding_mode="floor")
        kept, counts = torch.unique_consecutive(sentence, return_counts=True)
        group = int(counts[0]) if counts.numel() else 1
        if bool((counts != group).any()):
            kept, group = sentence, 1  # unequal beams: one copy per row
        state = replace(self, slots=self.slots.index_select(0, rows))
        if kept.numel() != self.memory_bias.shape[0] or bool(
            (kept != torch.arange(kept.numel(), device=kept.device)).any()
        ):
            memory = tuple(
                (k.index_select(0, kept), v.index_select(0, kept)) for k, v in self.memory
            )
            state = replace(
                state,
                cache=self.cache.index_select(2, kept),
                memory=memory,
                memory_bias=self.memory_bias.index_select(0, kept),
            )
        return state if group == self.group else state.regrouped(group)

    def regrouped(self, group: int) -> DecoderState:
        """The same rows in groups of another size: each row gets its own copy of its past."""
        layers, _, sentences, heads, capacity, _, width = self.cache.shape
        past = self.cache[:, :, :, :, : self.length]  # [L, 2, G, H, t, old K, E]
        index = self.slots[:, : self.length].view(sentences, group, -1).transpose(1, 2)
        index = index[None, None, :, None, :, :, None].expand(layers, 2, -1, heads, -1, -1, width)
        cache = past.new_empty((layers, 2, sentences, heads, capacity, group, width))
        cache[:, :, :, :, : self.length] = past.gather(5, index)
        own = torch.arange(group, device=index.device).repeat(sentences)
        return replace(self, cache=cache, slots=own[:, None].repeat(1, capacity), group=group)

    def prepared(self) -> DecoderState:
        """The same state with a free position in the cache, and what the next one may attend to."""
        cache, slots = self.cache, self.slots
        if cache.shape[4] == self.length:
            cache = F.pad(cache, (0, 0, 0, 0, 0, CACHE_STEP))
            slots = F.pad(slots, (0, CACHE_STEP))
        if self.group == 1:
            return replace(self, cache=cache, slots=slots, past_bias=None)
        own = torch.arange(self.group, device=slots.device)
        slots[:, self.length] = own.repeat(cache.shape[2])
        now = slots[:, : self.length + 1].view(-1, 1, self.group, self.length + 1, 1)
        bias = mask_bias((now == own).flatten(3), self.memory_bias.dtype)
        return replace(self, cache=cache, slots=slots, past_bias=bias)
