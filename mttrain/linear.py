"""Linear layers of training: x W^T + b, on a CPU by the library that multiplies fastest there.

`F.linear` in float32 goes to MKL, which on processors other than Intel's does not use the wide
vectors of AVX-512; oneDNN, which PyTorch brings too, does. Measured on two cores at the shapes of
training (some thousand rows, widths 128 to 2048): 208 to 222 GFLOP/s against 180 to 200, and its
bias and ReLU cost no pass of their own. With AVX2 alone they are equal, so there, on a GPU, and in
other types the layer is `F.linear`.

Price: one function of autograd with its backward written out. The gradient of the weight stays
with MKL: oneDNN would first turn the gradient of the output round in memory.

Shapes: N rows, `in` and `out` widths.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

# What PyTorch's own compiler calls; not all builds have it.
_MKLDNN = torch.ops.mkldnn
HAS_ONEDNN: bool = torch.backends.mkldnn.is_available() and all(  # type: ignore[no-untyped-call]
    hasattr(_MKLDNN, name) for name in ("_reorder_linear_weight", "_linear_pointwise")
)


def linear(x: Tensor, weight: Tensor, bias: Tensor, relu: bool = False) -> Tensor:
    """x [..., in], weight [out, in], bias [out] -> x W^T + b [..., out], or its positive part."""
    if not _onednn_is_faster(x, weight):
        out = F.linear(x, weight, bias)
        return F.relu(out) if relu else out
    rows: Tensor = _Linear.apply(x.reshape(-1, x.shape[-1]), weight, bias, relu)  # type: ignore[no-untyped-call]
    return rows.view(*x.shape[:-1], -1)


def product(x: Tensor, weight: Tensor) -> Tensor:
    """x [N, in] times the transpose of weight [out, in] -> [N, out]; no gradient."""
    if _onednn_is_faster(x, weight):
        return onednn_linear(x, weight)
    return torch.mm(x, weight.t())


def onednn_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, relu: bool = False
) -> Tensor:
    """The same by oneDNN, in float32 on a CPU; the weight may be packed. No gradient."""
    out: Tensor = _MKLDNN._linear_pointwise(x, weight, bias, "relu" if relu else "none", [], "")
    return out


def packed_linear(weight: Tensor, bias: Tensor | None) -> Callable[[Tensor], Tensor]:
    """x [N, in] -> [N, out], with a copy of the weight that lies as oneDNN reads it."""
    packed = _MKLDNN._reorder_linear_weight(weight, None)
    return lambda x: onednn_linear(x, packed, bias)


def _onednn_is_faster(x: Tensor, weight: Tensor) -> bool:
    """Decided by device, type and processor alone."""
    exact = x.dtype == weight.dtype == torch.float32 and x.device.type == "cpu"
    return exact and _has_wide_vectors() and not torch.is_autocast_enabled("cpu")


@cache
def _has_wide_vectors() -> bool:
    return HAS_ONEDNN and torch.backends.cpu.get_cpu_capability() == "AVX512"


class _Linear(torch.autograd.Function):
    """(x [N, in], weight [out, in], bias [out], relu) -> [N, out]"""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, relu: bool) -> Tensor:
        out = onednn_linear(x, weight, bias, relu)
        ctx.save_for_backward(x, weight, *([out] if relu else []))
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, *out = ctx.saved_tensors
        if out:
            grad = torch.ops.aten.threshold_backward(grad, out[0], 0)
        grad_x = onednn_linear(grad, weight.t()) if ctx.needs_input_grad[0] else None
        return grad_x, torch.mm(grad.t(), x), grad.sum(0), None
