"""How layers are computed in training: compiled, again in backward, or as they are written.

Both act on one layer at a time. `torch.compile` makes one piece of code for all encoder layers and
one for all decoder layers, with sizes that may vary; embeddings and the loss, which are few kernels
of their own, stay as they are. What is compiled depends on properties of the sizes all the same
(1, divisible by 8, two of them equal), so batches are padded (`padded`) until those are the same.

Under activation checkpointing (Chen et al. 2016, Training Deep Nets with Sublinear Memory Cost)
a layer keeps its input alone. Dropout masks are a function of keys that stand until the next
forward pass, so what is computed again is what was computed.

Price: some seconds to minutes of compiling at the first updates; padding to multiples of 8; with
activation checkpointing one more forward pass through the layers.

Shapes: B sentences, S source length, T target length.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, cast

import torch
import torch.fx.experimental._config
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from mttrain.errors import ConfigError, gist
from mttrain.linear import same_products
from mttrain.model import Layer, Transformer

ROWS, LENGTH = 4, 8  # what rows and lengths of a batch are rounded up to a multiple of
_LIMIT = 64  # versions of one piece of code; beyond them PyTorch gives up and interprets


def padded(tensor: Tensor, value: int) -> Tensor:
    """[B, T] -> [B', T'], both rounded up; what is added holds `value`."""
    rows, length = tensor.shape
    return F.pad(tensor, (0, -length % LENGTH, 0, -rows % ROWS), value=value)


class Compiler:
    """torch.compile with a count: `graphs` compiled so far, in `seconds` (backward not counted)."""

    def __init__(self, backend: str = "inductor") -> None:
        """backend: PyTorch's name of what makes code of a graph; the usual one needs a compiler."""
        self.backend = backend
        self.graphs = 0
        self.seconds = 0.0

    def __call__(self, function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        """The function as it will run compiled, in one piece for all sizes."""
        torch._dynamo.config.recompile_limit = _LIMIT
        # Else each layer is cut at the buckets of DistributedDataParallel, which wants the model
        # in one piece to be cut; layer after layer gradients travel during backward all the same.
        torch._dynamo.config.optimize_ddp = False
        # Else code made for as many rows as positions is for such batches alone.
        torch.fx.experimental._config.use_duck_shape = False
        return torch.compile(function, dynamic=True, backend=self._backend)

    def _backend(self, graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
        make = torch._dynamo.lookup_backend(self.backend)
        start = time.monotonic()
        compiled = make(graph, inputs)
        self.graphs += 1  # not before: what makes code may have the graph drawn anew
        self.seconds += time.monotonic() - start
        return cast(Callable[..., Any], compiled)


def prepare_layers(
    model: Transformer, device: torch.device, compiler: Compiler | None, recompute: bool
) -> None:
    """Let the layers of the model be computed that way in training.

    Raises ConfigError when the compiler does not work here.
    """
    if compiler is not None:
        if compiler.backend == "inductor":
            check_compiler(device)
        model.dropout_keys.hand_to(model, device)
    for module in model.modules():
        if not isinstance(module, Layer):
            continue
        if compiler is not None:
            # Inside of what is compiled: around it, the second pass may meet other code.
            module.trained_by = compiler(module.compute_again if recompute else module.compute)
        elif recompute:
            module.trained_by = partial(_again, module.compute)


def _again(function: Callable[..., Tensor], *inputs: Tensor | None) -> Tensor:
    """The function, of which backward keeps the inputs alone."""
    products = same_products()  # backward runs outside of what is around the forward pass

    def contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        return nullcontext(), products()

    out = checkpoint(
        function, *inputs, use_reentrant=False, preserve_rng_state=False, context_fn=contexts
    )
    return cast(Tensor, out)


def check_compiler(device: torch.device) -> None:
    """Compile a line of code for the device; ConfigError when that does not work here."""
    wanted = [os.environ.get("CXX", ""), "g++", "clang++", "c++", "gcc", "clang", "cc"]
    reason = "there is no C++ compiler (g++ or clang++) on this machine"
    if any(shutil.which(name) for name in wanted if name):
        try:
            double = torch.compile(lambda x: x * 2 + 1, dynamic=True)
            if double(torch.ones(8, device=device))[0].item() == 3.0:
                return
            reason = "a test gave a wrong number"
        except Exception as error:  # whatever a compiler or its driver raises
            reason = gist(error)
    raise ConfigError(
        f"train.compile: torch.compile does not work for {device.type} here: {reason}. Install "
        "what is missing, or set train.compile to false."
    )
