"""A trained Transformer as decoding runs it: flat functions over weights prepared once.

`Transformer` is written for training: many small modules, dropout, gradients. A decoding step of a
small model is so short that calling these modules costs as much as computing, so here a layer is a
dozen calls of torch on two-dimensional tensors, q, k and v in one product, the scale of the scores
folded into the weights of q, and nothing that does not change from step to step is computed twice.
The module tree stays the oracle: tests hold each step against `Transformer.decode` on the whole
prefix.

Price: a copy of the q, k and v weights, and on a CPU of every large matrix; and one function for
each kind of layer that says what the modules say. The weights must not change under a stepper: some
are copied when it is made, others are not.

On a CPU in float32 the attention over few positions is two batched products and a softmax, three to
fifteen times as fast as `scaled_dot_product_attention` there; elsewhere that is used.

Shapes: N = G sentences x K rows, S source length, D d_model, H heads, E = D / H, V vocabulary,
L layers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mttrain.errors import ConfigError
from mttrain.kvcache import DecoderState, new_state
from mttrain.linear import HAS_ONEDNN, packed_linear
from mttrain.masks import mask_bias
from mttrain.model import Transformer

# Query positions x key positions up to which explicit products beat the fused kernel on a CPU.
_FEW_PAIRS = 128 * 128

_ONEDNN = torch.ops.onednn
_LARGE = 512 * 512  # numbers of a matrix from which packing pays
_ZERO = 128  # the byte that stands for 0

Map = Callable[[Tensor], Tensor]  # [N, in] -> [N, out]


class ModelStepper:
    """A Transformer as the search wants it: float32 log-probabilities, whatever its precision.

    `dtype` is the type of the matrix products: a floating one, for which the caller runs the steps
    under `autocast`, or int8, on a CPU; in evaluation and without gradients.
    """

    def __init__(self, model: Transformer, dtype: torch.dtype = torch.float32) -> None:
        config = model.config
        if model.lm_head.weight.dtype == torch.float64:  # a model that is to be exact stays so
            dtype = torch.float64
        self.vocab_size = model.lm_head.out_features
        self.heads, self.d_model = config.num_heads, config.d_model
        self.model = model
        self.dtype = torch.float32 if dtype == torch.int8 else dtype  # of the attention
        encoder: list[Any] = list(model.encoder.layers)
        decoder: list[Any] = list(model.decoder.layers)
        self.encoder = [_Layer(layer, dtype) for layer in encoder]
        self.decoder = [_Layer(layer, dtype) for layer in decoder]
        # Keys and values of the source for all decoder layers: one product.
        pairs = [(a.k_proj, a.v_proj) for a in (layer.encoder_attn for layer in decoder)]
        self.keys_values = _linear([part for pair in pairs for part in pair], dtype)
        self.ends = [_final_norm(model.encoder), _final_norm(model.decoder)]
        self.project = _product(model.lm_head.weight.detach(), None, dtype)

    # ---- the Stepper protocol -----------------------------------------------------------------

    def start(self, src: Tensor) -> DecoderState:
        """Encode src [G, S] and prepare decoding from the first position; one row a sentence."""
        sentences, length = src.shape
        mask = self.model.source_mask(src)
        bias = mask_bias(mask, self.dtype)[:, None, None, :]  # [G, 1, 1, S]
        x = self.model.encoder.embed(src).view(-1, self.d_model)  # [G*S, D]
        for layer in self.encoder:
            x = layer.encode(x, sentences, bias)
        memory = self.keys_values(self.ends[0](x))  # [G*S, L*2*D]
        shape = (sentences, length, len(self.decoder), 2, self.heads, -1)
        memory = memory.view(shape).permute(2, 3, 0, 4, 1, 5).contiguous()  # [L, 2, G, H, S, E]
        return new_state(memory, bias)

    def step(self, tokens: Tensor, state: DecoderState) -> tuple[Tensor, DecoderState]:
        """tokens [N] of the current position -> log-probabilities of the next [N, V], new state.

        Position of the t-th call is t, from 0. The cache of `state` is written in place.
        """
        state = state.with_room()
        stack = self.model.decoder
        x = torch.add(
            stack.positions(state.length, 1),
            F.embedding(tokens, stack.embed_tokens.weight),
            alpha=stack.scale,
        )  # [N, D]
        layers = zip(self.decoder, state.current(), state.past(), state.sources(), strict=True)
        for layer, now, past, source in layers:
            x = layer.step(x, state, now, past, source)
        logits = self.project(self.ends[1](x))  # [N, V]
        if logits.device.type == "cpu" and logits.dtype == torch.float32:
            # In place: megabytes new to the process would cost more than the numbers.
            log_probs = torch.log_softmax(logits, -1, out=logits)
        else:
            log_probs = F.log_softmax(logits, dim=-1, dtype=torch.float32)
        return log_probs, replace(state, length=state.length + 1)

    def reorder(self, state: DecoderState, rows: Tensor, kept: Tensor | None) -> DecoderState:
        """The state with rows [N] of the old one, from its sentences `kept` (None: all)."""
        return state.reorder(rows, kept)


class _Layer:
    """The functions of one encoder or decoder layer; x [N, D] is always the residual stream."""

    def __init__(self, layer: Any, dtype: torch.dtype) -> None:
        attn = layer.self_attn
        self.pre_norm, self.activation = layer.pre_norm, layer.activation
        self.heads = attn.num_heads
        self.qkv = _linear([attn.q_proj, attn.k_proj, attn.v_proj], dtype, attn.scale)
        self.out = _linear([attn.out_proj], dtype)
        self.fc1 = _linear(
            [layer.fc1, layer.fc3] if self.activation == "swiglu" else [layer.fc1], dtype
        )
        self.fc2 = _linear([layer.fc2], dtype)
        self.norm, self.final_norm = (
            _norm(layer.self_attn_layer_norm),
            _norm(layer.final_layer_norm),
        )
        if hasattr(layer, "encoder_attn"):
            self.cross_q = _linear([layer.encoder_attn.q_proj], dtype, attn.scale)
            self.cross_out = _linear([layer.encoder_attn.out_proj], dtype)
            self.cross_norm = _norm(layer.encoder_attn_layer_norm)

    def encode(self, x: Tensor, sentences: int, bias: Tensor) -> Tensor:
        """x [G*S, D], bias [G, 1, 1, S] -> [G*S, D]; overwrites x."""
        joined = self.qkv(self.norm(x) if self.pre_norm else x)
        split = joined.view(sentences, -1, 3, self.heads, x.shape[1] // self.heads)
        split = split.permute(2, 0, 3, 1, 4).contiguous()  # [3, G, H, S, E]
        query, keys, values = split.flatten(1, 2).unbind(0)
        x.add_(self.out(_attend(query, keys, values, bias, self.heads)))
        return self._feed_forward(x if self.pre_norm else self.norm(x))

    def step(
        self,
        x: Tensor,
        state: DecoderState,
        now: Tensor,
        past: tuple[Tensor, Tensor],
        source: tuple[Tensor, Tensor],
    ) -> Tensor:
        """One position: x [N, D] -> [N, D]; overwrites x.

        now [2, G, H, K, E]: where the position's keys and values go; past: those up to it, for all
        rows of a sentence, [G*H, T*K, E] each; source: [G*H, S, E] each.
        """
        heads, width = self.heads, x.shape[1] // self.heads
        joined = self.qkv(self.norm(x) if self.pre_norm else x)
        # The rows of one sentence are queries of one attention over the positions of all of them.
        split = joined.view(-1, state.group, 3, heads, width).permute(2, 0, 3, 1, 4)
        now.copy_(split[1:])
        query = split[0].reshape(-1, state.group, width)  # [G*H, K, E]
        x.add_(self.out(_attend(query, *past, state.past_bias(), heads)))
        if not self.pre_norm:
            x = self.norm(x)
        joined = self.cross_q(self.cross_norm(x) if self.pre_norm else x)
        split = joined.view(-1, state.group, heads, width).transpose(1, 2)
        query = split.reshape(-1, state.group, width)
        x.add_(self.cross_out(_attend(query, *source, state.memory_bias, heads)))
        return self._feed_forward(x if self.pre_norm else self.cross_norm(x))

    def _feed_forward(self, x: Tensor) -> Tensor:
        hidden = self.fc1(self.final_norm(x) if self.pre_norm else x)
        if self.activation == "relu":
            hidden = torch.relu_(hidden)
        elif self.activation == "gelu":
            hidden = F.gelu(hidden)
        else:
            gate, value = hidden.chunk(2, -1)
            hidden = F.silu(gate).mul_(value)
        x.add_(self.fc2(hidden))
        return x if self.pre_norm else self.final_norm(x)


def _attend(query: Tensor, keys: Tensor, values: Tensor, bias: Tensor | None, heads: int) -> Tensor:
    """query [G*H, K, E] (scaled), keys and values [G*H, n, E], bias [G, 1, K|1, n] -> [G*K, D]"""
    _, width, size = query.shape
    few = width * keys.shape[1] <= _FEW_PAIRS
    if few and query.device.type == "cpu" and query.dtype == torch.float32:
        scores = torch.bmm(query, keys.transpose(1, 2))  # [G*H, K, n]
        if bias is not None:
            scores.view(-1, heads, width, scores.shape[2]).add_(bias)
        out = torch.bmm(torch.softmax(scores, -1), values).view(-1, heads, width, size)
    else:
        query, keys, values = (t.view(-1, heads, t.shape[1], size) for t in (query, keys, values))
        out = F.scaled_dot_product_attention(query, keys, values, bias, scale=1.0)
    return out.transpose(1, 2).reshape(-1, heads * size)


# ---- preparing the weights ----------------------------------------------------------------------


def _linear(parts: list[nn.Linear], dtype: torch.dtype, scale: float = 1.0) -> Map:
    """One product for several projections of the same input; the first is scaled."""
    weights = [part.weight.detach() for part in parts]
    biases = [part.bias.detach() for part in parts]
    if scale != 1.0:
        weights[0], biases[0] = weights[0] * scale, biases[0] * scale
    weight = torch.cat(weights) if len(parts) > 1 else weights[0]
    return _product(weight, torch.cat(biases), dtype)


def _product(weight: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Map:
    """x [N, in] -> [N, out], of weight [out, in].

    On a CPU oneDNN keeps a copy of a large matrix in its own order, which makes the product 1.2
    (320 rows) to 4 times (5 rows) as fast as one that has to rearrange it each time. Small matrices
    stay in float32 under int8, where the numbers around the product would cost more than it saves.
    """
    large = weight.numel() >= _LARGE
    if dtype == torch.int8:
        if large:
            return _int8_product(weight, bias)
        dtype = torch.float32
    exact = weight.device.type == "cpu" and dtype == weight.dtype == torch.float32
    if exact and large and HAS_ONEDNN:
        return packed_linear(weight, bias)
    columns = weight.to(dtype).t()
    if bias is None:
        return lambda x: torch.mm(x, columns)
    row = bias.to(dtype)
    return lambda x: torch.addmm(row, x, columns)


def _int8_product(weight: Tensor, bias: Tensor | None) -> Map:
    """Product of 8-bit integers: weight [out, in] rounded per output, the input per row.

    A row's scale is its own largest number, so the other rows of a batch do not matter.
    """
    levels = _weight_levels()
    scales = weight.abs().amax(1).clamp_(min=1e-12) / levels  # [out]
    rounded = torch.div(weight, scales[:, None]).round_().to(torch.int8)
    product = _packed_int8(rounded, scales)

    def run(x: Tensor) -> Tensor:
        scale = x.abs().amax(1, keepdim=True).clamp_(min=1e-12).div_(127)  # [N, 1]
        out = product(torch.div(x, scale).round_().add_(_ZERO).to(torch.uint8))
        return out.mul_(scale) if bias is None else torch.addcmul(bias, out, scale, out=out)

    return run


def _packed_int8(weight: Tensor, scales: Tensor) -> Map:
    """x [N, in] as bytes with zero at 128 -> (x - 128) @ weight^T * scales, in float32."""
    packed = _ONEDNN.qlinear_prepack(weight, None)
    zeros, run = torch.zeros(weight.shape[0], dtype=torch.int64), _ONEDNN.qlinear_pointwise.default
    # No bias; unscaled output; nothing after it.
    how: tuple[Any, ...] = (None, 1.0, 0, torch.float32, "none", [], "")
    return lambda x: run(x, 1.0, _ZERO, packed, scales, zeros, *how)


@lru_cache(maxsize=1)
def _weight_levels() -> int:
    """Largest magnitude of an 8-bit weight: 127, or 63 on a CPU that adds products in 16 bits.

    Without VNNI instructions two products of a byte and a weight are added with saturation.
    """
    if not all(hasattr(_ONEDNN, name) for name in ("qlinear_prepack", "qlinear_pointwise")):
        raise ConfigError("precision int8 needs a build of PyTorch with oneDNN; use fp32")
    extremes = torch.full((64, 64), 127, dtype=torch.int8)
    sums = _packed_int8(extremes, torch.ones(64))(torch.full((64, 64), 255, dtype=torch.uint8))
    return 127 if bool((sums == 64 * 127 * (255 - _ZERO)).all()) else 63


def _norm(norm: nn.LayerNorm) -> Map:
    shape, weight, bias, eps = norm.normalized_shape, norm.weight, norm.bias, norm.eps
    return lambda x: torch.layer_norm(x, shape, weight, bias, eps)


def _final_norm(stack: Any) -> Map:
    """The layer norm at the end of a pre-norm stack; a post-norm stack ends normalised."""
    return _norm(stack.layer_norm) if hasattr(stack, "layer_norm") else lambda x: x
