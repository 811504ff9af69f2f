"""How the parameters lie on the processes: whole on each, or sharded over all of them.

    ddp    each process holds everything; gradients are averaged (DistributedDataParallel)
    fsdp   each holds 1/W of parameters, gradients and moments; a layer is put together when it is
           computed (Zhao et al. 2023, PyTorch FSDP; torch.distributed.fsdp.fully_shard)

Both are PyTorch's own. Around them the trainer needs the same few things: a module to call, the
parameters that the optimiser sees, whole tensors for a checkpoint, and the way back. Under fsdp the
model that everybody else holds is a second one, whose memory is given back while updates run:
`collect` fills it from the shards, on all ranks, before a validation or a checkpoint.

Price of fsdp: every layer is gathered twice per batch and its gradients are exchanged once, also
within an accumulated update; a validation or a checkpoint takes a whole model on each device; the
training state of a checkpoint is put together in the memory of rank 0's CPU.

Shapes: W ranks; a parameter of first dimension N is cut into W pieces of ceil(N / W) rows, of which
the last may be shorter or empty.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from mttrain.distributed import World
from mttrain.errors import ConfigError
from mttrain.model import Transformer

# What keeps buffers from being exchanged at each forward: named anew in PyTorch 2.13.
_KNOWN = inspect.signature(DistributedDataParallel).parameters
_BUFFERS: dict[str, Any] = {
    "forward_sync_buffers" if "forward_sync_buffers" in _KNOWN else "broadcast_buffers": False
}
MakeStep = Callable[[Transformer], nn.Module]


class Parallel:
    """The model whole on each rank.

    trained: what the optimiser works on; step: what is called for forward and backward; `model`,
    for all others, is the trained one itself.
    """

    sharded = False

    def __init__(self, model: Transformer, world: World, make_step: MakeStep) -> None:
        """make_step: the module of an update around the model that is trained."""
        self.model = self.trained = model
        self.step = make_step(model)
        if world.size > 1:
            # The buffers are position tables, which each rank grows when it needs to.
            self.step = DistributedDataParallel(self.step, gradient_as_bucket_view=True, **_BUFFERS)

    def backward(self, last: bool) -> AbstractContextManager[None]:
        """Context of forward and backward over one part of an update; last: of it."""
        if not last and isinstance(self.step, DistributedDataParallel):
            return self.step.no_sync()
        return nullcontext()

    def collect(self) -> None:
        """Give `model` the weights as they are trained; every rank must call it."""

    def release(self) -> None:
        """`model` is not needed before the next `collect`."""

    def spread(self) -> None:
        """Take the weights of `model` into training."""

    def whole(self, value: Tensor) -> Tensor:
        """The whole of a parameter, gradient or moment; every rank must call it."""
        return value

    def like(self, parameter: Tensor, value: Tensor) -> Tensor:
        """A whole tensor on the device of the parameter, cut as that is."""
        return value.to(parameter.device)


class Sharded(Parallel):
    """The trained model in shards, and a whole one for others, without memory most of the time."""

    sharded = True

    def __init__(self, model: Transformer, world: World, make_step: MakeStep) -> None:
        # Copied where there is room: `fully_shard` takes one layer at a time to the device.
        self.trained = copy.deepcopy(model.cpu())
        self.model = model.to(world.device)
        mesh = init_device_mesh(world.device.type, (dist.get_world_size(),))
        layers = [*self.trained.encoder.layers, *self.trained.decoder.layers]
        for layer in layers:
            fully_shard(layer, mesh=mesh)
        # Embeddings, projection and last norms: gathered for the whole pass, with the root.
        self.step = make_step(self.trained)
        fully_shard(self.step, mesh=mesh)
        self._current = True

    def backward(self, last: bool) -> AbstractContextManager[None]:
        """Nothing: to keep whole gradients until the last part is what shards are to avoid."""
        return nullcontext()

    def collect(self) -> None:
        """Fill the whole model from the shards."""
        if self._current:
            return
        for parameter in self.model.parameters():
            parameter.untyped_storage().resize_(parameter.numel() * parameter.element_size())
        shards = dict(self.trained.named_parameters())
        with torch.no_grad():
            for name, parameter in self.model.named_parameters():
                parameter.copy_(self.whole(shards[name]))
        self._current = True

    def release(self) -> None:
        """Give back the memory of the whole model; shapes and names stay."""
        for parameter in self.model.parameters():
            parameter.untyped_storage().resize_(0)
        self._current = False

    def spread(self) -> None:
        """Cut the whole model into the shards."""
        whole = dict(self.model.named_parameters())
        with torch.no_grad():
            for name, parameter in self.trained.named_parameters():
                parameter.copy_(self.like(parameter, whole[name].detach()))
        self._current = True

    def whole(self, value: Tensor) -> Tensor:
        """What the ranks hold of it, put together."""
        return value.full_tensor() if isinstance(value, DTensor) else value

    def like(self, parameter: Tensor, value: Tensor) -> Tensor:
        """This rank's piece of it, without a word to the others."""
        value = value.to(parameter.device)
        if not isinstance(parameter, DTensor) or value.shape != parameter.shape:
            return value  # AdamW's step counters are whole everywhere
        piece = distribute_tensor(
            value, parameter.device_mesh, parameter.placements, src_data_rank=None
        )
        return piece.clone()  # a view would keep the whole


def parallel(kind: str, model: Transformer, world: World, make_step: MakeStep) -> Parallel:
    """The model on this world as `train.parallel` says: ddp or fsdp; alone there is nothing to
    share. ConfigError for fsdp on a device that cannot."""
    if kind == "fsdp" and world.size > 1:
        if world.device.type not in ("cpu", "cuda"):
            raise ConfigError(
                f"train.parallel fsdp runs on CUDA devices and on CPUs, not on "
                f"{world.device.type}; use ddp."
            )
        return Sharded(model, world, make_step)
    return Parallel(model, world, make_step)


def gathered(parallel: Parallel, tensors: Mapping[str, Tensor], keep: bool) -> dict[str, Tensor]:
    """The whole tensors by name, on every rank that asks for them with `keep`; sharded ones are put
    together one after the other, in the memory of the CPU. Every rank must call it."""
    found = {}
    for name, value in tensors.items():
        whole = parallel.whole(value)
        if keep:
            found[name] = whole.cpu() if parallel.sharded else whole
    return found
