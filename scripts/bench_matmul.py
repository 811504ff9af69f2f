"""The matrix products of real training steps: recorded, then run again alone.

`Recorder` is a dispatch mode: it sees every product below autograd, those of custom backward
functions too, with shapes, strides, types and places of operands and result. `Replay` runs only
these products, on operands and results that exist beforehand: what is left when everything else
of a step costs nothing. Fused attention counts as its products without recomputation: scores and
output forward; gradients of weights, values, queries and keys backward; causal masks are not
deducted.

Where an operand lies decides what reading it costs: a weight that the last product used is in the
caches, an activation of a layer long past is not. So the replay lays out all operands as they lay
in the real updates, in one block from which only the memory that no product touched is left out.

Shapes: as recorded; in attention B sentences, H heads, T queries, S keys, E head width.
"""

from __future__ import annotations

import time
from bisect import bisect_right
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from mttrain.linear import onednn_linear

# Which arguments are the two operands: (a, b), or (sum, a, b).
_PAIR = {"mm", "bmm", "mv", "_int_mm"}
_WITH_SUM = {"addmm", "addmm_", "baddbmm", "baddbmm_", "addmv", "addmv_"}
_SUSPECT = ("mm", "linear", "einsum", "conv", "attention")  # told of when they are not known
_LINE = 64  # bytes of a line of a cache
_HARMLESS = {"native_layer_norm", "native_layer_norm_backward"}


@dataclass(frozen=True)
class Layout:
    """Shape, stride and type of an operand, and its address; None: nobody saw it."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    place: int | None = None

    @classmethod
    def of(cls, tensor: Tensor) -> Layout:
        return cls(tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype, tensor.data_ptr())

    @classmethod
    def plain(cls, dtype: torch.dtype, *shape: int) -> Layout:
        """Contiguous."""
        strides, step = [], 1
        for size in reversed(shape):
            strides.append(step)
            step *= size
        return cls(shape, tuple(reversed(strides)), dtype)

    @property
    def turned(self) -> Layout:
        """The last two dimensions exchanged, without moving anything."""
        shape, stride = self.shape, self.stride
        return replace(
            self,
            shape=(*shape[:-2], shape[-1], shape[-2]),
            stride=(*stride[:-2], stride[-1], stride[-2]),
        )

    @property
    def extent(self) -> int:
        """Bytes from the first number to the last."""
        steps = zip(self.shape, self.stride, strict=True)
        return (1 + sum((size - 1) * step for size, step in steps)) * self.dtype.itemsize


@dataclass(frozen=True)
class Product:
    """a @ b -> out; `adds`: into what `out` holds already; `onednn`: by that library."""

    a: Layout
    b: Layout
    out: Layout
    adds: bool = False
    onednn: bool = False

    @property
    def flops(self) -> int:
        """Multiplications and additions."""
        total = 2 * self.a.shape[-1]
        for size in self.out.shape:
            total *= size
        return total


class Recorder(TorchDispatchMode):
    """Collects the products of each update; `cut` ends an update."""

    def __init__(self) -> None:
        super().__init__()
        self.updates: list[list[Product]] = []
        self.unknown: set[str] = set()
        self._current: list[Product] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        self._current += self._products(func._schema.name.split("::")[-1], args, result)
        return result

    def cut(self) -> None:
        """What came since the last cut was one update."""
        self.updates.append(self._current)
        self._current = []

    def _products(self, name: str, args: tuple[Any, ...], result: Any) -> list[Product]:
        if name in _PAIR or name in _WITH_SUM:
            a, b = args[:2] if name in _PAIR else args[1:3]
            in_place = name.endswith("_")
            return [Product(Layout.of(a), Layout.of(b), Layout.of(result), adds=in_place)]
        if name == "_linear_pointwise":
            a, b = Layout.of(args[0]), Layout.of(args[1].t())
            return [Product(a, b, Layout.of(result), onednn=True)]
        if name.startswith("_scaled_dot_product") and isinstance(args[0], Tensor):
            if name.endswith("_backward"):
                return attention_backward(args[1], args[2])
            return attention_forward(args[0], args[1])
        if any(part in name for part in _SUSPECT) and name not in _HARMLESS:
            self.unknown.add(name)
        return []


def attention_forward(query: Tensor, key: Tensor) -> list[Product]:
    """query [B, H, T, E], key [B, H, S, E]: scores = Q K^T, output = P V."""
    q, k, scores = _attention_layouts(query, key)
    return [Product(q, k.turned, scores), Product(scores, k, q)]


def attention_backward(query: Tensor, key: Tensor) -> list[Product]:
    """dP = dO V^T, dV = P^T dO, dQ = dS K, dK = dS^T Q."""
    q, k, scores = _attention_layouts(query, key)
    return [
        Product(q, k.turned, scores),
        Product(scores.turned, q, k),
        Product(scores, k, q),
        Product(scores.turned, q, k),
    ]


def _attention_layouts(query: Tensor, key: Tensor) -> tuple[Layout, Layout, Layout]:
    """Contiguous [B*H, T, E], [B*H, S, E] and [B*H, T, S]."""
    batch, heads, queries, width = query.shape
    rows, keys, dtype = batch * heads, key.shape[2], query.dtype
    return (
        Layout.plain(dtype, rows, queries, width),
        Layout.plain(dtype, rows, keys, width),
        Layout.plain(dtype, rows, queries, keys),
    )


class Replay:
    """Recorded updates, ready to run: `time_of(first, last)` runs those updates' products."""

    def __init__(self, updates: Sequence[Sequence[Product]], device: torch.device) -> None:
        self.device = device
        self.flops = [sum(product.flops for product in update) for update in updates]
        layouts = {
            layout
            for update in updates
            for product in update
            for layout in (product.a, product.b, product.out)
        }
        self._ground = _Ground(layouts)
        # Products of products: they soon overflow, which costs nothing, but are never denormal.
        numbers = torch.randn(self._ground.size // 4, device=device)
        self._memory = numbers.view(torch.uint8)
        self._calls = [[self._call(product) for product in update] for update in updates]
        self.time_of(0, len(updates))  # warm

    def _operand(self, layout: Layout) -> Tensor:
        first = self._ground.offset(layout)
        flat = self._memory[first : first + layout.extent].view(layout.dtype)
        return flat.as_strided(layout.shape, layout.stride)

    def _call(self, product: Product) -> Callable[[], Any]:
        a, b, out = map(self._operand, (product.a, product.b, product.out))
        if product.onednn:  # this function makes its result
            return lambda: onednn_linear(a, b.t())
        if product.adds:
            add = (out.addmv_, out.addmm_, out.baddbmm_)[out.dim() - 1]
            return lambda: add(a, b)
        multiply = (torch.mv, torch.mm, torch.bmm)[out.dim() - 1]
        return lambda: multiply(a, b, out=out)

    @torch.no_grad()
    def time_of(self, first: int, last: int) -> float:
        """Seconds that the products of updates first .. last-1 take, alone."""
        calls = [call for update in self._calls[first:last] for call in update]
        synchronise(self.device)
        start = time.perf_counter()
        for call in calls:
            call()
        synchronise(self.device)
        return time.perf_counter() - start


class _Ground:
    """The memory that operands touched, its gaps closed; `size` in bytes."""

    def __init__(self, layouts: Collection[Layout]) -> None:
        spans = sorted((x.place, x.extent) for x in layouts if x.place is not None)
        self._starts: list[int] = []  # of each piece without gaps: its address ...
        self._offsets: list[int] = []  # ... and where it lies here
        size = end = 0
        for place, extent in spans:
            if not self._starts or place > end:
                end = place - place % _LINE
                self._starts.append(end)
                self._offsets.append(_whole_lines(size))
            end = max(end, place + extent)
            size = self._offsets[-1] + end - self._starts[-1]
        self._unseen = _whole_lines(size)
        largest = max((x.extent for x in layouts if x.place is None), default=0)
        self.size = _whole_lines(self._unseen + largest)

    def offset(self, layout: Layout) -> int:
        """Where an operand begins; those that nobody saw share one place behind the others."""
        if layout.place is None:
            return self._unseen
        piece = bisect_right(self._starts, layout.place) - 1
        return self._offsets[piece] + layout.place - self._starts[piece]


def _whole_lines(count: int) -> int:
    return -(-count // _LINE) * _LINE


def synchronise(device: torch.device) -> None:
    """Wait for a GPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
