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
            block = torch.cat([hidden[place] for place in places])
            found = sums.add(block, targets[start:end], wanted)
            if found is None or grad_hidden is None or grad_weight is None:
                continue
            grad = found.to(hidden.dtype)
            pieces = product(grad, projection.t()).chunk(passes)
            for place, piece in zip(places, pieces, strict=True):
                grad_hidden[place] = piece
            weight_gradient(grad, block, grad_weight)
        if grad_hidden is not None and grad_weight is not None:
            sums.finish(hidden, grad_hidden, grad_weight)
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
    """Adds up the loss chunk by chunk; `total` [3]: loss, nll, correct.

    What counts here is how often a chunk of logits is read and written.
    """

    def __init__(
        self,
        weight: Tensor,
        dtype: torch.dtype,
        smoothing: float,
        consistency: float,
        passes: int,
    ) -> None:
        self.weight, self.smoothing, self.passes = weight, smoothing, passes
        self.column_sums = weight.sum(0, dtype=dtype)  # [D], of the rows of the weight
        self.share = 1.0 / passes
        self.kl_share = 0.25 * consistency
        # By what the gradients that `add` returns are to be multiplied.
        self.scale = -self.kl_share if self.kl_share else self.share
        self.total = torch.zeros(3, dtype=dtype, device=weight.device)

    def add(self, block: Tensor, targets: Tensor, wanted: bool) -> Tensor | None:
        """One chunk: R rows of each pass, block [C*R, D], targets [R]; returns the gradients of the
        logits [C*R, V], but for what `finish` does, when they are wanted."""
        logits = product(block, self.weight).to(self.total.dtype)
        gap = torch.sub(*logits.chunk(2)) if self.kl_share else None
        places = targets.repeat(self.passes)[:, None]
        probs, norm = self._likelihood(block, logits, places)
        grad = probs if gap is None else self._divergence(probs, gap, norm, wanted)
        if not wanted:
            return None
        chosen = self.share * (self.smoothing - 1.0) / self.scale
        return grad.scatter_add_(1, places, grad.new_full(places.shape, chosen))

    def finish(self, hidden: Tensor, grad_hidden: Tensor, grad_weight: Tensor) -> None:
        """Scale the gradients of hidden [C*R, D] and weight [V, D], and add what the smoothing's
        share of all types, -e / V in every logit's gradient, does to them: the same for all rows of
        each, so no pass over the logits is needed."""
        if self.scale != 1.0:
            grad_hidden.mul_(self.scale)
            grad_weight.mul_(self.scale)
        if self.smoothing:
            each = self.share * self.smoothing / self.weight.shape[0]
            grad_hidden.sub_((each * self.column_sums).to(grad_hidden.dtype))
            grad_weight.sub_(each * hidden.sum(0, dtype=self.total.dtype))

    def _likelihood(self, rows: Tensor, logits: Tensor, places: Tensor) -> tuple[Tensor, Tensor]:
        """Add the smoothed loss of all passes; returns probabilities [C*R, V], in place of the
        logits on a CPU, and log sum exp(z) [C*R, 1].

        With p = softmax(z), V types and smoothing e, the loss of one row is
        (1 - e) * -log p[y] + e / V * sum_v -log p[v]   (Szegedy et al. 2016, section 7)
        and its gradient in the logits is p - (1 - e) * onehot(y) - e / V.
        """
        picked, highest = logits.gather(1, places), logits.amax(1, keepdim=True)
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

    def _divergence(self, probs: Tensor, gap: Tensor, norm: Tensor, wanted: bool) -> Tensor:
        """Add the divergence of two passes; returns the gradients of both, cross-entropy's
        probabilities included, one below the other, divided by -w; w is `kl_share`.

        probs [2R, V]: p of one pass, q of the other; gap [R, V]: the difference of their logits,
        used up; norm [2R, 1]: log sum exp of each.

        R-Drop (Liang et al. 2021, equations 1 to 3) adds a/2 * (KL(p|q) + KL(q|p)) to the sum of
        the losses of both passes; here everything is half of that, so that a = 0 leaves a mean.
        With d = log p - log q = gap - n, where n is the difference of the norms, the gradient of
        KL(p|q) in p's logits is p * (d - KL(p|q)), in q's it is q - p: of both together and of the
        likelihood
        p * (w * (d - KL(p|q)) + w + share) - w * q, and for q with -d and KL(q|p).
        """
        (p, q), w = probs.chunk(2), self.kl_share
        shift = torch.sub(*norm.chunk(2))
        grads = torch.empty_like(probs)
        first, second = grads.chunk(2)
        inside, outside = (torch.mul(x, gap, out=first).sum(1, keepdim=True) for x in (p, q))
        kl = inside - shift, shift - outside
        self.total[0] += w * (kl[0] + kl[1]).sum()
        if not wanted:
            return grads
        rest = 1.0 + self.share / w
        torch.add(gap, rest - shift - kl[0], out=first)
        torch.sub(rest + shift - kl[1], gap, out=second)
        torch.addcmul(q, p, first, value=-1, out=first)
        torch.addcmul(p, q, second, value=-1, out=second)
        return grads


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
