"""The matrix products of real training steps: recorded, then run again alone.

`Recorder` is a dispatch mode: it sees every product below autograd, those of custom backward
functions too, with shapes, strides and types of operands and result. `Replay` runs only these
products, on operands and results that exist beforehand: what is left when everything else of a
step costs nothing. Fused attention counts as its products without recomputation: scores and output
forward; gradients of weights, values, queries and keys backward; causal masks are not deducted.

The operands of all products lie in the same three buffers, so they are warmer than in training,
which makes the bound at most about 3 % stricter.

Shapes: as recorded; in attention B sentences, H heads, T queries, S keys, E head width.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

# Which arguments are the two operands: (a, b), or (sum, a, b).
_PAIR = {"mm", "bmm", "mv", "_int_mm"}
_WITH_SUM = {"addmm", "addmm_", "baddbmm", "baddbmm_", "addmv", "addmv_"}
_SUSPECT = ("mm", "linear", "einsum", "conv", "attention")  # told of when they are not known
_HARMLESS = {"native_layer_norm", "native_layer_norm_backward"}


@dataclass(frozen=True)
class Layout:
    """Shape, strides and type of an operand."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: Tensor) -> Layout:
        return cls(tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype)

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
        return Layout(
            (*shape[:-2], shape[-1], shape[-2]), (*stride[:-2], stride[-1], stride[-2]), self.dtype
        )

    @property
    def extent(self) -> int:
        """Numbers from the first to the last."""
        return 1 + sum(
            (size - 1) * step for size, step in zip(self.shape, self.stride, strict=True)
        )


@dataclass(frozen=True)
class Product:
    """a @ b -> out; `adds`: into what `out` holds already."""

    a: Layout
    b: Layout
    out: Layout
    adds: bool = False

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
        sizes: dict[tuple[str, torch.dtype], int] = {}
        for update in updates:
            for product in update:
                for slot in ("a", "b", "out"):
                    layout: Layout = getattr(product, slot)
                    key = (slot, layout.dtype)
                    sizes[key] = max(sizes.get(key, 0), layout.extent)
        # Small numbers: sums that are added to again and again stay finite.
        self._buffers = {
            key: (torch.randn(size, device=device) * 1e-3).to(key[1]) for key, size in sizes.items()
        }
        self._calls = [[self._call(product) for product in update] for update in updates]
        self.time_of(0, len(updates))  # warm

    def _call(self, product: Product) -> Callable[[], Any]:
        a, b, out = (
            self._buffers[slot, layout.dtype].as_strided(layout.shape, layout.stride)
            for slot, layout in (("a", product.a), ("b", product.b), ("out", product.out))
        )
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


def synchronise(device: torch.device) -> None:
    """Wait for a GPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
