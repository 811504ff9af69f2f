"""Multi-head attention, and a fast path for the many short sequences of translation on a CPU.

A training batch holds hundreds of sentences of some 20 subwords. There the CPU kernel behind
`scaled_dot_product_attention`, made for long sequences, takes several times as long as the two
matrix products and the softmax that attention is; so up to `SHORT` positions they are computed one
by one (Vaswani et al. 2017, equation 1). Everywhere else, and on a GPU, the library's kernel works.

Price of the short path: the weights, B x H x T x S numbers, are kept for backward.

Shapes: B sentences, T query positions, S key positions, D d_model, H heads, E = D / H head width.
Masks are additive biases; see `masks`.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from mttrain.config import ModelConfig
from mttrain.dropout import DropoutKeys, KeyedDropout, scaled_mask
from mttrain.linear import linear, roomy
from mttrain.masks import causal_mask, mask_bias

SHORT = 128  # positions up to which the explicit products win on a CPU
VECTOR = 16  # softmax over fewer numbers than fit two AVX2 registers is computed one by one


class Attention(nn.Module):
    """Multi-head attention (Vaswani et al. 2017, section 3.2.2) with separate q, k, v projections.

    The products run fused (one for q, k and v of self-attention, one for k and v of
    cross-attention) over weights joined on the fly; the parameters keep their own names.
    """

    def __init__(self, config: ModelConfig, keys: DropoutKeys) -> None:
        super().__init__()
        d_model = config.d_model
        self.num_heads = config.num_heads
        self.q_proj = nn.Linear(d_model, d_model)
        self.k_proj = nn.Linear(d_model, d_model)
        self.v_proj = nn.Linear(d_model, d_model)
        self.out_proj = nn.Linear(d_model, d_model)
        # Section 3.2.1; without it the scores grow with the width of a head.
        self.scale = (d_model // config.num_heads) ** -0.5 if config.scale_attention else 1.0
        self.dropout = KeyedDropout(config.attention_dropout, keys)
        for projection in (self.q_proj, self.k_proj, self.v_proj):
            # q, k and v act as one D x 3D matrix, whose Glorot scale is 1/sqrt(2) of a square one.
            nn.init.xavier_uniform_(projection.weight, gain=2**-0.5)
        nn.init.xavier_uniform_(self.out_proj.weight)
        for projection in (self.q_proj, self.k_proj, self.v_proj, self.out_proj):
            nn.init.zeros_(projection.bias)

    def query_factor(self) -> float:
        """What other programs, which divide scores by sqrt(E), must multiply the query with."""
        return self.scale * float((self.q_proj.in_features // self.num_heads) ** 0.5)

    def joined(self, *names: str) -> tuple[Tensor, Tensor]:
        """Weights [n*D, D] and biases [n*D] of the named projections, one below the other."""
        parts = [getattr(self, f"{name}_proj") for name in names]
        return torch.cat([p.weight for p in parts]), torch.cat([p.bias for p in parts])

    def split_heads(self, x: Tensor, parts: int) -> tuple[Tensor, ...]:
        """[B, T, parts*D] -> `parts` tensors [B, H, T, E]"""
        batch, length, _ = x.shape
        shaped = x.view(batch, length, parts, self.num_heads, -1)
        return shaped.permute(2, 0, 3, 1, 4).unbind(0)

    def forward(self, x: Tensor, bias: Tensor | None, causal: bool = False) -> Tensor:
        """Self-attention: x [B, T, D] -> [B, T, D]; bias [B, 1, 1, T]"""
        return self._mixed(linear(x, *self.joined("q", "k", "v")), None, bias, causal)

    def cross(self, x: Tensor, memory: Tensor, bias: Tensor | None) -> Tensor:
        """Cross-attention: x [B, T, D] attends to memory [B, S, D] -> [B, T, D]"""
        query = linear(x, self.q_proj.weight, self.q_proj.bias)
        return self._mixed(query, linear(memory, *self.joined("k", "v")), bias, False)

    def _mixed(
        self, query: Tensor, keys_values: Tensor | None, bias: Tensor | None, causal: bool
    ) -> Tensor:
        """query [B, T, D] with keys_values [B, S, 2D], or [B, T, 3D] alone -> [B, T, D]"""
        if not torch.compiler.is_compiling() and _is_short(query, keys_values):
            if causal:
                bias = _causal_bias(query.shape[1], query.dtype)
            drop = (self.dropout.rate, self.dropout.key) if self.dropout.active else None
            heads = self.num_heads, self.scale
            context = _ShortAttention.apply(query, keys_values, bias, heads, drop)  # type: ignore[no-untyped-call]
            return self._out(context)
        if keys_values is None:
            q, k, v = self.split_heads(query, 3)
        else:
            (q,), (k, v) = self.split_heads(query, 1), self.split_heads(keys_values, 2)
        return self.attend(q, k, v, bias, causal)

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, causal: bool = False
    ) -> Tensor:
        """query [B, H, T, E], key and value [B, H, S, E], bias [B|1, 1, T|1, S] -> [B, T, D]"""
        if self.dropout.active:
            # scaled_dot_product_attention would draw its dropout from the global generator.
            weights = self.dropout(self.weights(query, key, bias, causal))
            out = torch.matmul(weights, value)
        else:
            out = F.scaled_dot_product_attention(
                query, key, value, bias, is_causal=causal, scale=self.scale
            )
        batch, _, length, _ = query.shape
        return self._out(out.transpose(1, 2).reshape(batch, length, -1))

    def _out(self, context: Tensor) -> Tensor:
        return linear(context, self.out_proj.weight, self.out_proj.bias)

    def weights(self, query: Tensor, key: Tensor, bias: Tensor | None, causal: bool) -> Tensor:
        """Attention weights [B, H, T, S], each row summing to 1 (equation 1 of the paper)."""
        scores = torch.matmul(query * self.scale, key.transpose(-1, -2))
        if causal:
            allowed = causal_mask(scores.shape[-1], scores.device)
            scores = scores + mask_bias(allowed, scores.dtype)
        if bias is not None:
            scores = scores + bias.to(scores.dtype)
        return torch.softmax(scores, dim=-1)


def _is_short(query: Tensor, keys_values: Tensor | None) -> bool:
    """Whether the explicit products are the faster way; decided by sizes alone."""
    longest = query.shape[1] if keys_values is None else max(query.shape[1], keys_values.shape[1])
    exact = query.dtype in (torch.float32, torch.float64)
    return query.device.type == "cpu" and exact and longest <= SHORT


@lru_cache(maxsize=2 * SHORT)
def _causal_bias(length: int, dtype: torch.dtype) -> Tensor:
    return mask_bias(causal_mask(length, torch.device("cpu")), dtype)


class _ShortAttention(torch.autograd.Function):
    """(query, keys_values, bias, heads, dropout) -> context [B, T, D], before the out projection.

    query [B, T, D] and keys_values [B, S, 2D], or query [B, T, 3D] and None; bias broadcasts to
    [B, H, T, S]; heads: their number, and the factor of the scores; dropout: (rate, key) of the
    weights, or None.
    """

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        keys_values: Tensor | None,
        bias: Tensor | None,
        heads: tuple[int, float],
        dropout: tuple[float, int] | None,
    ) -> Tensor:
        batch, length, _ = query.shape
        count, scale = heads
        if keys_values is None:
            d_model = query.shape[2] // 3
            query, keys_values = query[..., :d_model], query[..., d_model:]
            ctx.joined = True
        else:
            ctx.joined = False
        width = max(VECTOR, keys_values.shape[1])
        q = _heads_first(query, 1, count, length)[0]  # [B*H, T, E]
        k, v = _heads_first(keys_values, 2, count, width)  # [B*H, S or more, E]
        scores = q.new_empty(q.shape[0], length, width)
        torch.baddbmm(scores, q, k.transpose(1, 2), beta=0, alpha=scale, out=scores)
        if bias is not None or width > keys_values.shape[1]:
            hidden = _padded_bias(bias, keys_values.shape[1], width, q)
            scores.view(batch, count, length, width).add_(hidden)
        weights = torch.softmax(scores, -1)
        ctx.save_for_backward(q, k, v, weights)
        ctx.scale, ctx.dropout, ctx.keys = scale, dropout, keys_values.shape[1]
        if dropout is not None:
            rate, key = dropout
            weights = weights * scaled_mask(weights.shape, rate, key, weights)
        return _heads_last(torch.bmm(weights, v)[None], batch)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, weights = ctx.saved_tensors
        batch, length, d_model = grad.shape
        heads = q.shape[0] // batch
        out = _heads_first(grad, 1, heads, length)[0]  # [B*H, T, E]
        grad_weights = torch.bmm(out, v.transpose(1, 2))
        dropped = weights
        if ctx.dropout is not None:
            rate, key = ctx.dropout
            mask = scaled_mask(weights.shape, rate, key, weights)
            dropped = weights * mask
            grad_weights.mul_(mask)
        pair = torch.empty((2, *k.shape), dtype=k.dtype)  # gradients of keys and values
        torch.bmm(dropped.transpose(1, 2), out, out=pair[1])
        scores = torch.ops.aten._softmax_backward_data(grad_weights, weights, -1, weights.dtype)
        torch.baddbmm(pair[0], scores.transpose(1, 2), q, beta=0, alpha=ctx.scale, out=pair[0])
        single = torch.baddbmm(q, scores, k, beta=0, alpha=ctx.scale)[None]
        pair = pair[:, :, : ctx.keys]
        if not ctx.joined:
            return _heads_last(single, batch), _heads_last(pair, batch), None, None, None
        joined = roomy(grad, batch, length, 3 * d_model)
        _heads_last(single, batch, joined[..., :d_model])
        _heads_last(pair, batch, joined[..., d_model:])
        return joined, None, None, None, None


def _heads_first(x: Tensor, parts: int, heads: int, width: int) -> Tensor:
    """x [B, T, parts*D] -> [parts, B*H, width, E], zero behind position T"""
    batch, length, columns = x.shape
    size = columns // (parts * heads)
    out = x.new_empty((parts, batch, heads, width, size))
    out[:, :, :, length:].zero_()
    shaped = x.view(batch, length, parts, heads, size).permute(2, 0, 3, 1, 4)
    out[:, :, :, :length].copy_(shaped)
    return out.view(parts, batch * heads, width, size)


def _heads_last(x: Tensor, batch: int, out: Tensor | None = None) -> Tensor:
    """x [parts, B*H, T, E] -> [B, T, parts*D], into `out` if it is given"""
    parts, rows, length, size = x.shape
    heads = rows // batch
    shaped = x.view(parts, batch, heads, length, size).permute(1, 3, 0, 2, 4)
    if out is None:
        out = roomy(x, batch, length, parts * heads * size)
    out.view(batch, length, parts, heads, size).copy_(shaped)
    return out


def _padded_bias(bias: Tensor | None, keys: int, width: int, like: Tensor) -> Tensor:
    """The bias [..., keys], or none, as [..., width]: nothing may attend behind the keys."""
    if bias is None:
        bias = like.new_zeros(1, 1, 1, keys)
    return F.pad(bias.to(like.dtype), (0, width - keys), value=torch.finfo(like.dtype).min / 2)
