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

from mttrain.linear import lowered, product, weight_gradient

CHUNK_ELEMENTS_CPU = 1 << 21  # 8 MB of float32 logits: stay in the caches
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
    """(hidden [C*R, D], weight [V, D], targets [R], smoothing, consistency, wanted) ->
    loss, (nll, correct).

    hidden holds C = 1 or 2 passes over the same R rows, one below the other; all sums are means
    over the passes. Only the first result carries a gradient. `wanted` says whether it will be
    asked for: inside a function of autograd `no_grad` cannot be seen.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        smoothing: float,
        consistency: float,
        wanted: bool,
    ) -> tuple[Tensor, Tensor]:
        wide = torch.float64 if hidden.dtype == torch.float64 else torch.float32
        projection = weight.to(hidden.dtype)
        rows = len(targets)
        passes = len(hidden) // rows if rows else 1
        sums = _Sums(projection, wide, smoothing, consistency, passes)
        grad_hidden = torch.empty_like(hidden) if wanted else None
        grad_weight = torch.zeros_like(weight) if wanted else None
        for start, end in _chunks(hidden, weight.shape[0] * passes, rows):
            places = [slice(start + i * rows, end + i * rows) for i in range(passes)]
            grads = sums.add([hidden[place] for place in places], targets[start:end], wanted)
            if grad_hidden is None or grad_weight is None:
                continue
            for place, wide_grad in zip(places, grads, strict=True):
                grad = wide_grad.to(hidden.dtype)
                grad_hidden[place] = product(grad, projection.t())
                weight_gradient(grad, hidden[place], grad_weight)
        if grad_hidden is not None and grad_weight is not None:
            sums.smooth(hidden, grad_hidden, grad_weight)
            ctx.save_for_backward(grad_hidden, grad_weight)
        loss, rest = sums.total[0].clone(), sums.total[1:].clone()
        ctx.mark_non_differentiable(rest)
        return loss, rest

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        grad_hidden, grad_weight = ctx.saved_tensors
        return (
            grad_hidden * grad.to(grad_hidden.dtype),
            grad_weight * grad.to(grad_weight.dtype),
            *(None,) * 4,
        )


def chunk_rows(elements: int, vocab: int) -> int:
    """Rows of a chunk of so many logits, where each row has `vocab` of them."""
    return max(64, elements // vocab // 32 * 32)


def _chunks(hidden: Tensor, vocab: int, rows: int) -> list[tuple[int, int]]:
    elements = CHUNK_ELEMENTS_CPU if hidden.device.type == "cpu" else CHUNK_ELEMENTS_DEVICE
    size = chunk_rows(elements, vocab)
    return [(start, min(start + size, rows)) for start in range(0, rows, size)]


class _Sums:
    """Adds up the loss chunk by chunk; `total` [3]: loss, nll, correct."""

    def __init__(
        self,
        weight: Tensor,
        dtype: torch.dtype,
        smoothing: float,
        consistency: float,
        passes: int,
    ) -> None:
        self.weight, self.smoothing = weight, smoothing
        self.column_sums = weight.sum(0, dtype=dtype)  # [D], of the rows of the weight
        self.share = 1.0 / passes
        self.kl_share = 0.25 * consistency
        self.total = torch.zeros(3, dtype=dtype, device=weight.device)

    def add(self, blocks: list[Tensor], targets: Tensor, wanted: bool) -> list[Tensor]:
        """One chunk, a block of rows [R, D] for each pass; returns the gradients of the logits,
        [R, V] for each pass, when they are wanted, but for what `smooth` adds."""
        logits = [product(rows, self.weight).to(self.total.dtype) for rows in blocks]
        gap = logits[0] - logits[1] if self.kl_share else None
        each = [self._likelihood(rows, z, targets) for rows, z in zip(blocks, logits, strict=True)]
        probs = [p for p, _ in each]
        if gap is not None:
            gap.sub_(each[0][1] - each[1][1])  # log p1 - log p2
            grads = self._divergence(probs[0], probs[1], gap, wanted)
        elif self.share != 1.0:
            grads = [p.mul_(self.share) for p in probs]
        else:
            grads = probs
        if not wanted:
            return []
        for grad in grads:
            chosen = grad.new_full((len(targets), 1), self.share * (self.smoothing - 1.0))
            grad.scatter_add_(1, targets[:, None], chosen)
        return grads

    def smooth(self, hidden: Tensor, grad_hidden: Tensor, grad_weight: Tensor) -> None:
        """Add what the smoothing's share of all types, -e / V in every logit's gradient, does to
        the gradients of hidden [C*R, D] and weight [V, D]: the same for all rows of each, so no
        pass over the logits is needed."""
        if self.smoothing:
            each = self.share * self.smoothing / self.weight.shape[0]
            grad_hidden.sub_((each * self.column_sums).to(grad_hidden.dtype))
            grad_weight.sub_(each * hidden.sum(0, dtype=self.total.dtype))

    def _likelihood(self, rows: Tensor, logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Add the smoothed loss of one pass; returns probabilities [R, V], in place of the logits
        on a CPU, and log sum exp(z) [R, 1].

        With p = softmax(z), V types and smoothing e, the loss of one row is
        (1 - e) * -log p[y] + e / V * sum_v -log p[v]   (Szegedy et al. 2016, section 7)
        and its gradient in the logits is p - (1 - e) * onehot(y) - e / V.
        """
        picked, highest = logits.gather(1, targets[:, None]), logits.amax(1, keepdim=True)
        # In place on a CPU, where memory that is new to the caches is slow.
        probs = torch.softmax(logits, -1, out=logits if logits.device.type == "cpu" else None)
        # log sum exp(z) from the largest probability, at least 1 / V: no second pass of exp.
        norm = highest - probs.amax(1, keepdim=True).log_()
        nll = (norm - picked).sum()
        loss = (1.0 - self.smoothing) * nll
        if self.smoothing:
            # The logits of one row sum up to its product with the sum of the weight's rows.
            total = (rows.to(logits.dtype) * self.column_sums).sum()
            loss = loss + self.smoothing * (norm.sum() - total / self.weight.shape[0])
        found = torch.stack((loss, nll, (picked >= highest).sum().to(nll.dtype)))
        self.total.add_(found, alpha=self.share)
        return probs, norm

    def _divergence(self, p: Tensor, q: Tensor, gap: Tensor, wanted: bool) -> list[Tensor]:
        """Add the divergence of two passes; returns the gradients of both, cross-entropy's
        probabilities included. p, q [R, V]: probabilities; gap [R, V] = log p - log q, used up.

        R-Drop (Liang et al. 2021, equations 1 to 3) adds a/2 * (KL(p|q) + KL(q|p)) to the sum of
        the losses of both passes; here everything is half of that, so that a = 0 leaves a mean.
        The gradient of KL(p|q) in p's logits is p * (gap - KL(p|q)), in q's it is q - p.
        """
        kl = [(p * gap).sum(1, keepdim=True), -(q * gap).sum(1, keepdim=True)]
        w = self.kl_share
        self.total[0] += w * (kl[0] + kl[1]).sum()
        if not wanted:
            return []
        first = gap * w
        first.add_(self.share + w - w * kl[0]).mul_(p).sub_(q, alpha=w)
        second = gap.mul_(-w).add_(self.share + w - w * kl[1]).mul_(q).sub_(p, alpha=w)
        return [first, second]


def smoothed_loss(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    smoothing: float,
    pad_id: int = 0,
    rows: Tensor | None = None,
) -> LossSums:
    """Sums of the label-smoothed loss over all targets that are not padding.

    hidden [..., D], weight [V, D] (the output projection), targets [...] of the same leading shape.
    Equal to `F.cross_entropy(..., ignore_index=pad_id, label_smoothing=..., reduction="sum")`:
    the smoothing mass is spread over all V types, and padded positions add nothing.
    No counted token gives zeros (never 0/0); gradients flow to hidden and weight. `rows`: where
    there is no padding, as `real_rows` finds it; on a GPU to find it here waits for the device.
    """
    one = hidden.reshape(1, -1, hidden.shape[-1])
    return _sums(one, weight, targets, smoothing, 0.0, pad_id, rows)


def consistent_loss(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    smoothing: float,
    consistency: float,
    pad_id: int = 0,
    rows: Tensor | None = None,
) -> LossSums:
    """R-Drop (Liang et al. 2021): two passes with other dropout masks are to say the same.

    hidden [2B, T, D]: B sentences and the same again, targets [B, T]. smoothed: the mean of the
    losses of both passes + consistency / 4 * (KL(p1|p2) + KL(p2|p1)), half of what the paper adds
    up; nll and correct are means of both; tokens are counted once. `rows` as for `smoothed_loss`.
    """
    both = hidden.reshape(2, -1, hidden.shape[-1])
    return _sums(both, weight, targets, smoothing, consistency, pad_id, rows)


def real_rows(targets: Tensor, pad_id: int = 0) -> Tensor:
    """Places of the targets [...] that are no padding, in the flattened tensor: int64 [R]"""
    return (targets.reshape(-1) != pad_id).nonzero()[:, 0]


def _sums(
    passes: Tensor,
    weight: Tensor,
    targets: Tensor,
    smoothing: float,
    consistency: float,
    pad_id: int,
    rows: Tensor | None,
) -> LossSums:
    """passes [C, N, D], targets of N elements"""
    flat_targets = targets.reshape(-1)
    real = real_rows(targets, pad_id) if rows is None else rows
    # The final layer norm gives float32, and no context reaches the products of an own function.
    found = lowered(passes.index_select(1, real).flatten(0, 1))
    chosen = flat_targets.index_select(0, real)
    wanted = torch.is_grad_enabled()
    loss, rest = _ProjectedLoss.apply(found, weight, chosen, smoothing, consistency, wanted)  # type: ignore[no-untyped-call]
    return LossSums(loss, rest[0], int(real.numel()), rest[1])
