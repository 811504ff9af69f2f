"""One update of the weights: forward and backward over its batches, clip, step of the optimiser.

One update takes `accumulate` batches on each of W ranks. Its divisor, the target tokens of all of
them, is known from the plan before the first backward, so the gradient is the mean over tokens
however they are grouped, and two processes train what one does on the same global batches.

Nothing draws from a global generator: dropout is a function of (seed, update, global micro-batch),
the learning rate of the update.

Price beside the model's own work: the device is waited for once per micro-batch, for the number of
rows of the loss, and once per update, for the norm of the gradient, which must be known finite
before it is used.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from mttrain.checkpoint import TrainState
from mttrain.config import RunConfig
from mttrain.dataset import Batch
from mttrain.distributed import World, training_precision, training_type
from mttrain.errors import TrainingError
from mttrain.loss import LossSums, consistent_loss, smoothed_loss
from mttrain.machine import out_of_memory
from mttrain.model import Transformer
from mttrain.optim import (
    WeightAverage,
    build_optimizer,
    clip_gradients,
    gradient_norm,
    learning_rate,
    reserve_memory,
    set_learning_rate,
)

# On a CPU a batch is computed in parts of so many cells x d_model, 2 MB for each tensor of a layer:
# what is kept for backward grows with the part, and what does not fit the caches is slow.
PART_ELEMENTS = 1 << 19
_EMA = "ema"  # what follows a parameter's name in the training state


class StepModule(nn.Module):
    """Model and loss in one forward, so that DistributedDataParallel and compile wrap it whole."""

    def __init__(self, model: Transformer, smoothing: float, consistency: float = 0.0) -> None:
        """consistency: R-Drop's weight; above 0 every batch passes twice, as one twice as large."""
        super().__init__()
        self.model = model
        self.smoothing, self.consistency = smoothing, consistency

    def forward(self, source: Tensor, target_in: Tensor, target_out: Tensor) -> LossSums:
        """source [B, S], target_in and target_out [B, T] -> sums over the target tokens"""
        weight = self.model.lm_head.weight
        if self.consistency:
            hidden = self.model(source.repeat(2, 1), target_in.repeat(2, 1))
            how = self.smoothing, self.consistency, self.model.pad_id
            return consistent_loss(hidden, weight, target_out, *how)
        hidden = self.model(source, target_in)
        return smoothed_loss(hidden, weight, target_out, self.smoothing, self.model.pad_id)


@dataclass(frozen=True)
class Outcome:
    """What an update did.

    sums: smoothed loss and negative log-likelihood in nats, and correct tokens, of this rank; norm:
    of the gradient of all ranks; rate: of learning; finite: whether the gradient was, else the
    weights are as before; pieces: in how many its batches were cut to fit in memory, 1 = none was.
    """

    sums: tuple[float, float, float]
    norm: float
    rate: float
    finite: bool
    pieces: int


class Updater:
    """Model, optimiser and what stands between them."""

    def __init__(
        self, config: RunConfig, model: Transformer, world: World, locate: Callable[[int], str]
    ) -> None:
        """locate: file and line of a pair's number, for messages."""
        self.config, self.model, self.world, self.locate = config, model, world, locate
        self.optimizer = build_optimizer(model, config.optim)
        self._keeps_gradients = world.device.type == "cpu" and world.size == 1
        if self._keeps_gradients:
            reserve_memory(self.optimizer)
        self.dtype = training_type(config.train.precision, world.device)
        self.scaler = torch.amp.GradScaler(world.device.type, enabled=self.dtype == torch.float16)
        step: nn.Module = StepModule(model, config.optim.label_smoothing, config.optim.rdrop)
        if world.size > 1:
            # The buffers are position tables, which each rank grows when it needs to.
            step = DistributedDataParallel(
                step, gradient_as_bucket_view=True, broadcast_buffers=False
            )
        self.step = step
        decay = config.train.ema
        self.ema = None if decay is None else WeightAverage(dict(model.named_parameters()), decay)
        self._sums: list[Tensor] = []

    # ---- state -------------------------------------------------------------------------------

    def state(self) -> TrainState:
        """Tensors of the optimiser by parameter name, and the values of the loss scaler."""
        tensors = {}
        for name, parameter in self.model.named_parameters():
            for key, value in self.optimizer.state.get(parameter, {}).items():
                tensors[f"{name}:{key}"] = value
        if self.ema is not None:
            tensors |= {f"{name}:{_EMA}": value for name, value in self.ema.weights.items()}
        return TrainState(tensors=tensors, values={"scaler": self.scaler.state_dict()})

    def restore(self, state: TrainState) -> None:
        """Go on from a saved state."""
        if state.values["scaler"]:  # empty when the run was not in float16
            self.scaler.load_state_dict(state.values["scaler"])
        parameters = dict(self.model.named_parameters())
        for key, value in state.tensors.items():
            name, _, part = key.rpartition(":")
            parameter = parameters[name]
            if part == _EMA:
                assert self.ema is not None  # train.ema cannot change in a run
                self.ema.weights[name].copy_(value)
                continue
            # AdamW keeps its step counters where its kernels want them, not with the moments.
            capturable = part == "step" and parameter.device.type == "cpu"
            device = torch.device("cpu") if capturable else parameter.device
            self.optimizer.state[parameter][part] = value.to(device)

    # ---- one update --------------------------------------------------------------------------

    def run(self, group: Sequence[Batch], divisor: int, update: int) -> Outcome:
        """Update number `update` (from 1) on this rank's batches; divisor: target tokens of all.

        A batch that does not fit in memory is computed in pieces; TrainingError when a single pair
        does not fit, or when other processes would have to wait.
        """
        pieces = self._gradients(group, divisor, update)
        self.scaler.unscale_(self.optimizer)
        norm = gradient_norm(self.model.parameters())
        rate = learning_rate(update, self.config.optim, self.config.train.max_steps)
        finite = math.isfinite(norm.item())
        if finite:
            if self.config.optim.clip_norm is not None:
                clip_gradients(self.model.parameters(), norm, self.config.optim.clip_norm)
            set_learning_rate(self.optimizer, rate)
            self.scaler.step(self.optimizer)
            if self.ema is not None:
                self.ema.add(update)
        self.scaler.update()
        smoothed, nll, correct = torch.stack(self._sums).cpu().double().sum(0).tolist()
        self._forget()
        return Outcome((smoothed, nll, correct), norm.item(), rate, finite, pieces)

    def ema_weights(self) -> dict[str, Tensor] | None:
        """The running mean of the weights by parameter name, if one is kept."""
        return None if self.ema is None else self.ema.weights

    def _forget(self) -> None:
        """Gradients and sums of the update."""
        self.optimizer.zero_grad(set_to_none=not self._keeps_gradients)
        self._sums = []

    def _gradients(self, group: Sequence[Batch], divisor: int, update: int) -> int:
        """Add up the gradients of all batches; the number of pieces that each was cut into."""
        pieces = 1
        while (failed := self._attempt(group, divisor, update, pieces)) is not None:
            rows, longest = failed.target_out.shape
            if self.world.size > 1 or rows == 1:
                raise TrainingError(
                    f"out of memory in update {update}, at a batch of {rows} pairs of up to "
                    f"{longest} subwords ({', '.join(map(self.locate, failed.indices[:3]))}"
                    f"{', ...' if rows > 3 else ''}). Lower train.batch_tokens and raise "
                    "train.accumulate instead, and start with --fresh: the plan of the batches "
                    "changes."
                )
            # A backward that was cut short has left gradients behind: all of it once more.
            self._forget()
            if self.world.device.type == "cuda":
                torch.cuda.empty_cache()
            pieces *= 2
        return pieces

    def _attempt(
        self, group: Sequence[Batch], divisor: int, update: int, pieces: int
    ) -> Batch | None:
        """Forward and backward over all batches; the part that did not fit in memory, or None."""
        for index, batch in enumerate(group):
            # The number of the micro-batch among all ranks': so one process repeats what two do.
            micro = index * self.world.size + self.world.rank
            parts = self._parts(batch, pieces)
            for number, part in enumerate(parts):
                self.model.dropout_keys.set(self.config.seed, update, micro, number)
                last = index == len(group) - 1 and number == len(parts) - 1
                try:
                    self._backward(part, divisor, last)
                except (RuntimeError, MemoryError) as error:
                    if not out_of_memory(error):
                        raise
                    return part
        return None

    def _parts(self, batch: Batch, pieces: int) -> list[Batch]:
        """What of a batch is computed at once: all on a GPU, on a CPU what its caches can hold."""
        rows = batch.source.shape[0]
        cells = rows * max(batch.source.shape[1], batch.target_out.shape[1])
        if self.world.device.type == "cpu":
            passes = 2 if self.config.optim.rdrop else 1
            cells = min(cells, PART_ELEMENTS // (passes * self.config.model.d_model))
        return list(batch.parts(-(-cells // pieces)))

    def _backward(self, batch: Batch, divisor: int, last: bool) -> None:
        on_device = batch.to(self.world.device)
        keep_local: AbstractContextManager[None] = nullcontext()
        if not last and isinstance(self.step, DistributedDataParallel):
            keep_local = self.step.no_sync()
        with keep_local:
            with training_precision(self.world.device, self.dtype):
                sums = self.step(on_device.source, on_device.target_in, on_device.target_out)
            # DistributedDataParallel averages over ranks; the divisor already counts all of them.
            loss = sums.smoothed * (self.world.size / divisor)
            self.scaler.scale(loss).backward()
        self._sums.append(torch.stack((sums.smoothed.detach(), sums.nll, sums.correct)))
