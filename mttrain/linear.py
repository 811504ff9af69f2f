"""Linear layers of training: x W^T + b, on a CPU by the library that multiplies fastest there.

`F.linear` in float32 goes to MKL, which on processors other than Intel's does not use the wide
vectors of AVX-512; oneDNN, which PyTorch brings too, does. Measured on two cores at the shapes of
training (some thousand rows, widths 128 to 2048): 208 to 222 GFLOP/s against 180 to 200, and its
bias and ReLU cost no pass of their own. With AVX2 alone they are equal, so there, on a GPU, and in
other types the layer is `F.linear`.

oneDNN compiles a kernel for each shape and keeps 0.7 MB for it, and the batches of a corpus have
hundreds of numbers of rows. So rows are rounded up, to one of 4 numbers in each doubling: what
makes the input of a linear layer here gives it room (`roomy`), memory behind the last row that is
read, multiplied, and thrown away. An input without room, or far from the next number, goes to MKL.

Price: up to an eighth more rows; the room itself; a copy behind each layer norm; and a backward
written out. The gradient of the weight stays with MKL: oneDNN would first turn the gradient of the
output round in memory.

In bfloat16 (`bfloat16_products`) a processor with instructions for it makes 450 to 500 GFLOP/s on
one core where float32 has 110. Everything between the products stays in float32: activations are
rounded on their way into a product, its result is widened behind it, and the gradients of weights
are added up in float32. `torch.autocast` would also send attention over short sentences to a
bfloat16 kernel that takes ten times as long as the float32 products.

Shapes: N rows, `in` and `out` widths.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
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


_FEWEST = 128  # rows below which a kernel of its own for each shape does not pay
_STEPS = 4  # numbers of rows in each doubling
_HALF = torch.bfloat16
_halves: ContextVar[bool] = ContextVar("products in bfloat16", default=False)


@contextmanager
def bfloat16_products() -> Iterator[None]:
    """Within the block `linear` multiplies float32 on a CPU as bfloat16, forward and backward."""
    token = _halves.set(True)
    try:
        yield
    finally:
        _halves.reset(token)


def same_products() -> Callable[[], AbstractContextManager[None]]:
    """What makes a context in which `linear` multiplies as it does here."""
    return bfloat16_products if _halves.get() else nullcontext


@cache
def bfloat16_is_fast() -> bool:
    """Whether this processor multiplies bfloat16 faster than float32."""
    capabilities = torch.cpu.get_capabilities()
    return HAS_ONEDNN and bool(capabilities.get("avx512_bf16") or capabilities.get("amx_bf16"))


def lowered(x: Tensor) -> Tensor:
    """x in the type in which its products are made: by autocast, or within `bfloat16_products`."""
    kind = x.device.type
    if torch.is_autocast_enabled(kind):
        return x.to(torch.get_autocast_dtype(kind))
    return x.to(_HALF) if _in_halves(x) else x


def linear(x: Tensor, weight: Tensor, bias: Tensor, relu: bool = False) -> Tensor:
    """x [..., in], weight [out, in], bias [out] -> x W^T + b [..., out], or its positive part."""
    if torch.compiler.is_compiling():  # which has no use for memory behind the last row
        out = F.linear(x, weight, bias)
        return F.relu(out) if relu else out
    if _in_halves(x):
        wide: Tensor = _HalfLinear.apply(x.reshape(-1, x.shape[-1]), weight, bias, relu)  # type: ignore[no-untyped-call]
        return wide.view(*x.shape[:-1], -1)
    if not _onednn_is_faster(x, weight):
        out = F.linear(x, weight, bias)
        return F.relu(out) if relu else out
    rows: Tensor = _Linear.apply(x.reshape(-1, x.shape[-1]), weight, bias, relu)  # type: ignore[no-untyped-call]
    return rows.view(*x.shape[:-1], -1)


def product(x: Tensor, weight: Tensor) -> Tensor:
    """x [N, in] times the transpose of weight [out, in] -> [N, out]; no gradient."""
    if _is_half(x):
        return torch.mm(_rounded_half(x), weight.t())[: x.shape[0]]
    return _product(x, weight) if _onednn_is_faster(x, weight) else torch.mm(x, weight.t())


def weight_gradient(grad: Tensor, x: Tensor, total: Tensor) -> None:
    """Add the transpose of grad [N, out] times x [N, in] to total [out, in]."""
    if _is_half(x):
        total.add_(torch.mm(_rounded_half(grad).t(), _rounded_half(x)))
    elif total.dtype == grad.dtype:
        total.addmm_(grad.t(), x)
    else:
        total.add_(grad.t() @ x)


def _product(x: Tensor, weight: Tensor, bias: Tensor | None = None, relu: bool = False) -> Tensor:
    """Where oneDNN is faster: by oneDNN if x has room, and then the result has it too."""
    wide = _whole(x)
    if wide is not None:
        return onednn_linear(wide, weight, bias, relu)[: x.shape[0]]
    out = torch.mm(x, weight.t()) if bias is None else torch.addmm(bias, x, weight.t())
    return out.relu_() if relu else out


def roomy(like: Tensor, *shape: int) -> Tensor:
    """Uninitialised [..., width] of the type and device of `like`; if a linear layer behind it can
    use that, with room behind its rows."""
    rows = math.prod(shape[:-1])
    kept = _rounded(rows) if _onednn_is_faster(like, like) else rows
    return like.new_empty(kept, shape[-1])[:rows].view(shape)


def with_room(x: Tensor) -> Tensor:
    """x [..., D], copied to where it has room if the linear layer behind it can use that."""
    if torch.compiler.is_compiling() or not _onednn_is_faster(x, x):
        return x
    copied: Tensor = _WithRoom.apply(x)  # type: ignore[no-untyped-call]
    return copied


def onednn_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, relu: bool = False
) -> Tensor:
    """x W^T + b, or its positive part, by oneDNN in float32 on a CPU; the weight may be packed."""
    out: Tensor = _MKLDNN._linear_pointwise(x, weight, bias, "relu" if relu else "none", [], "")
    return out


def packed_linear(weight: Tensor, bias: Tensor | None) -> Callable[[Tensor], Tensor]:
    """x [N, in] -> [N, out], with a copy of the weight that lies as oneDNN reads it."""
    packed = _MKLDNN._reorder_linear_weight(weight, None)
    return lambda x: onednn_linear(x, packed, bias)


def _rounded(rows: int) -> int:
    step = max(1, (1 << (rows - 1).bit_length()) // (2 * _STEPS)) if rows > 0 else 1
    return -(-rows // step) * step


def _whole(x: Tensor) -> Tensor | None:
    """x [N, in] with the room behind it; None: there is none, or it would not pay."""
    rows, width = x.shape
    wanted = _rounded(rows)
    if rows < _FEWEST or wanted > rows + rows // 8 or not x.is_contiguous():
        return None
    end = (x.storage_offset() + wanted * width) * x.element_size()
    if x.untyped_storage().nbytes() < end:
        return None
    return x.as_strided((wanted, width), (width, 1))


def _onednn_is_faster(x: Tensor, weight: Tensor) -> bool:
    """Decided by device, type and processor alone."""
    exact = x.dtype == weight.dtype == torch.float32 and x.device.type == "cpu"
    low = torch.is_autocast_enabled("cpu") or _halves.get()
    return exact and _has_wide_vectors() and not low


def _in_halves(x: Tensor) -> bool:
    return _halves.get() and x.dtype == torch.float32 and x.device.type == "cpu"


def _is_half(x: Tensor) -> bool:
    return x.dtype == _HALF and x.device.type == "cpu"


def _rounded_half(x: Tensor) -> Tensor:
    """x [N, width] in bfloat16, with rows of zeros up to one of few numbers of rows: oneDNN makes a
    kernel for each, and in the gradient of a weight what stands in the rows is added up."""
    rows, width = x.shape
    wanted = _rounded(rows)
    if wanted == rows:
        return x.to(_HALF)
    out = x.new_empty(wanted, width, dtype=_HALF)
    out[:rows].copy_(x)
    out[rows:].zero_()
    return out


@cache
def _has_wide_vectors() -> bool:
    return HAS_ONEDNN and torch.backends.cpu.get_cpu_capability() == "AVX512"


class _Linear(torch.autograd.Function):
    """(x [N, in], weight [out, in], bias [out], relu) -> [N, out]"""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, relu: bool) -> Tensor:
        out = _product(x, weight, bias, relu)
        ctx.save_for_backward(x, weight, *([out] if relu else []))
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, *out = ctx.saved_tensors
        if out:
            grad = torch.ops.aten.threshold_backward.grad_input(
                grad, out[0], 0, grad_input=roomy(grad, *grad.shape)
            )
        grad_x = _product(grad, weight.t()) if ctx.needs_input_grad[0] else None
        return grad_x, torch.mm(grad.t(), x), grad.sum(0), None


class _HalfLinear(torch.autograd.Function):
    """(x [N, in], weight [out, in], bias [out], relu) -> [N, out]: float32, by bfloat16 products"""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, relu: bool) -> Tensor:
        rows, low = _rounded_half(x), weight.to(_HALF)
        out = F.linear(rows, low, bias.to(_HALF))
        if relu:
            out.relu_()
        ctx.save_for_backward(rows, low, *([out] if relu else []))
        return out[: x.shape[0]].float()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, *out = ctx.saved_tensors
        rows = _rounded_half(grad)
        if out:
            rows = torch.ops.aten.threshold_backward(rows, out[0], 0)
        grad_x = None
        if ctx.needs_input_grad[0]:
            grad_x = torch.mm(rows, weight)[: grad.shape[0]].float()
        grad_bias = rows.sum(0, dtype=torch.float32) if out else grad.sum(0)
        return grad_x, torch.mm(rows.t(), x).float(), grad_bias, None


class _WithRoom(torch.autograd.Function):
    """x -> the same values"""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return roomy(x, *x.shape).copy_(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad
