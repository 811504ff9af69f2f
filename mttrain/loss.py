"""Label-smoothed cross-entropy over the output projection, as sums and a count.

Logits of a whole batch (4,096 tokens x 32,000 types = 500 MB) never exist: rows are taken in chunks
that fit the cache, and for each chunk the projection, the loss and both gradients are computed at
once, in the forward pass, into buffers that are used again. Backward only scales them.

Price: three matrix products per chunk (logits, gradient of the rows, gradient of the weight), what
plain autograd also does, without the traffic of the logits.

Shapes: R rows (positions of all sentences), D d_model, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from mttrain.linear import product

CHUNK_ELEMENTS_CPU = 1 << 20  # 4 MB of float32 logits: stay in the caches
CHUNK_ELEMENTS_DEVICE = 1 << 26  # on a GPU few large kernels win


@dataclass(frozen=True)
class LossSums:
    """Sums over the counted target tokens (EOS included, padding never).

    smoothed: label-smoothed cross-entropy in nats, with a gradient; nll: negative log-likelihood in
    nats; tokens: how many were counted; correct: how often the target was the most likely type.
    All but `tokens` are 0-dimensional tensors on the device of the model.
    """

    smoothed: Tensor
    nll: Tensor
    tokens: int
    correct: Tensor


class _ProjectedLoss(torch.autograd.Function):
    """(hidden [R, D], weight [V, D], targets [R], smoothing) -> smoothed, (nll, correct).

    Only the first carries a gradient. `wanted` says whether it will be asked for: inside a function
    of autograd `no_grad` cannot be seen.
    """

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, smoothing: float, wanted: bool
    ) -> tuple[Tensor, Tensor]:
        wide = torch.float64 if hidden.dtype == torch.float64 else torch.float32
        sums = torch.zeros(3, dtype=wide, device=hidden.device)
        projection = weight.to(hidden.dtype)
        column_sums = projection.sum(0, dtype=wide)
        grad_hidden = torch.empty_like(hidden) if wanted else None
        grad_weight = torch.zeros_like(weight) if wanted else None
        for start, end in _chunks(hidden, weight.shape[0]):
            rows, chosen = hidden[start:end], targets[start:end]
            grad = _chunk(rows, projection, column_sums, chosen, smoothing, sums, wanted)
            if grad is None or grad_hidden is None or grad_weight is None:
                continue
            grad = grad.to(rows.dtype)
            grad_hidden[start:end] = product(grad, projection.t())
            if grad_weight.dtype == grad.dtype:
                grad_weight.addmm_(grad.t(), rows)
            else:
                grad_weight.add_(grad.t() @ rows)
        if grad_hidden is not None and grad_weight is not None:
            ctx.save_for_backward(grad_hidden, grad_weight)
        smoothed, rest = sums[0].clone(), sums[1:].clone()
        ctx.mark_non_differentiable(rest)
        return smoothed, rest

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        grad_hidden, grad_weight = ctx.saved_tensors
        return (
            grad_hidden * grad.to(grad_hidden.dtype),
            grad_weight * grad.to(grad_weight.dtype),
            None,
            None,
            None,
        )


def _chunks(hidden: Tensor, vocab: int) -> list[tuple[int, int]]:
    elements = CHUNK_ELEMENTS_CPU if hidden.device.type == "cpu" else CHUNK_ELEMENTS_DEVICE
    size = max(64, elements // vocab // 32 * 32)
    return [(start, min(start + size, len(hidden))) for start in range(0, len(hidden), size)]


def _chunk(
    rows: Tensor,
    weight: Tensor,
    column_sums: Tensor,
    targets: Tensor,
    smoothing: float,
    sums: Tensor,
    wanted: bool,
) -> Tensor | None:
    """Add one chunk to `sums`; returns the gradient of the logits [R, V] when it is wanted.

    With p = softmax(z), V types and smoothing e, the loss of one row is
    (1 - e) * -log p[y] + e / V * sum_v -log p[v]   (Szegedy et al. 2016, section 7)
    and its gradient in the logits is p - (1 - e) * onehot(y) - e / V. column_sums [D]: the sum of
    the rows of the weight.
    """
    logits = product(rows, weight).to(sums.dtype)
    column = targets[:, None]
    picked, highest = logits.gather(1, column), logits.amax(1, keepdim=True)
    # In place on a CPU, where memory that is new to the caches is slow.
    probs = torch.softmax(logits, -1, out=logits if logits.device.type == "cpu" else None)
    # log sum exp(z) from the largest probability, which is at least 1 / V: no second pass of exp.
    norm = highest - probs.amax(1, keepdim=True).log_()
    nll = (norm - picked).sum()
    vocab = weight.shape[0]
    sums[0] += (1.0 - smoothing) * nll
    if smoothing:
        # The logits of one row sum up to its product with the sum of the weight's rows.
        total = (rows.to(sums.dtype) * column_sums).sum()
        sums[0] += smoothing * (norm.sum() - total / vocab)
    sums[1] += nll
    sums[2] += (picked >= highest).sum()
    if not wanted:
        return None
    if smoothing:
        probs.sub_(smoothing / vocab)
    probs.scatter_add_(1, column, torch.full_like(picked, smoothing - 1.0))
    return probs


def smoothed_loss(
    hidden: Tensor, weight: Tensor, targets: Tensor, smoothing: float, pad_id: int = 0
) -> LossSums:
    """Sums of the label-smoothed loss over all targets that are not padding.

    hidden [..., D], weight [V, D] (the output projection), targets [...] of the same leading shape.
    Equal to `F.cross_entropy(..., ignore_index=pad_id, label_smoothing=..., reduction="sum")`:
    the smoothing mass is spread over all V types, and padded positions add nothing.
    No counted token gives zeros (never 0/0); gradients flow to hidden and weight.
    """
    flat, flat_targets = hidden.reshape(-1, hidden.shape[-1]), targets.reshape(-1)
    real = (flat_targets != pad_id).nonzero()[:, 0]
    rows = flat.index_select(0, real)
    if torch.is_autocast_enabled(rows.device.type):
        # The final layer norm gives float32, and autocast does not reach products with `out=`.
        rows = rows.to(torch.get_autocast_dtype(rows.device.type))
    chosen = flat_targets.index_select(0, real)
    wanted = torch.is_grad_enabled()
    smoothed, rest = _ProjectedLoss.apply(rows, weight, chosen, smoothing, wanted)  # type: ignore[no-untyped-call]
    return LossSums(smoothed, rest[0], int(real.numel()), rest[1])
