"""One update of the weights: forward and backward over its batches, clip, step of the optimiser.

One update takes `accumulate` batches on each of W ranks. Its divisor, the target tokens of all of
them, is known from the plan before the first backward, so the gradient is the mean over tokens
however they are grouped, and two processes train what one does on the same global batches.

Nothing draws from a global generator: dropout is a function of (seed, update, global micro-batch),
the learning rate of the update.

On a GPU an update is never waited for: what stands in its batches is known to the CPU, batches come
from pinned memory, the optimiser's kernel itself leaves out an update whose gradient is not finite,
and the figures of an update are read when the next one is under way (`Pending`). So the copy of a
batch stands in the queue of the GPU while that computes the update before, and a stream of its own
would hide no more than the copy of some hundred thousand ids.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from mttrain.checkpoint import TrainState
from mttrain.compiling import Compiler, padded, prepare_layers
from mttrain.config import RunConfig
from mttrain.dataset import Batch
from mttrain.distributed import World, autocast, training_precision, training_type
from mttrain.errors import TrainingError
from mttrain.loss import LossSums, consistent_loss, real_rows, smoothed_loss
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
    step_if_finite,
)
from mttrain.parallel import gathered, parallel

# On a CPU a batch is computed in parts of so many cells x d_model, 2 MB for each tensor of a layer:
# what is kept for backward grows with the part, and what does not fit the caches is slow.
PART_ELEMENTS = 1 << 19
_EMA = "ema"  # what follows a parameter's name in the training state


def cells_at_once(config: RunConfig, device: torch.device, sharded: bool) -> int:
    """Cells of a side of a batch that go through the model together."""
    # Shards are gathered at each forward, by all ranks together: one for each batch.
    if device.type != "cpu" or sharded:
        return sys.maxsize
    passes = 2 if config.optim.rdrop else 1
    return PART_ELEMENTS // (passes * config.model.d_model)


class StepModule(nn.Module):
    """Model and loss in one forward, so that DistributedDataParallel and compile wrap it whole."""

    def __init__(self, model: Transformer, smoothing: float, consistency: float = 0.0) -> None:
        """consistency: R-Drop's weight; above 0 every batch passes twice, as one twice as large."""
        super().__init__()
        self.model = model
        self.smoothing, self.consistency = smoothing, consistency

    def forward(
        self, source: Tensor, target_in: Tensor, target_out: Tensor, rows: Tensor | None = None
    ) -> LossSums:
        """source [B, S], target_in and target_out [B, T], rows [R] (`loss.real_rows`) -> sums over
        the target tokens"""
        weight = self.model.lm_head.weight
        if self.consistency:
            hidden = self.model(source.repeat(2, 1), target_in.repeat(2, 1))
            how = self.smoothing, self.consistency, self.model.pad_id
            return consistent_loss(hidden, weight, target_out, *how, rows)
        hidden = self.model(source, target_in)
        return smoothed_loss(hidden, weight, target_out, self.smoothing, self.model.pad_id, rows)


@dataclass(frozen=True)
class Outcome:
    """What an update did.

    sums: smoothed loss and negative log-likelihood in nats, and correct tokens, of this rank; norm:
    of the gradient of all ranks; finite: whether the gradient was, else the
    weights are as before, and the running mean takes those; pieces: in how many its batches were
    cut to fit in memory, 1 = none was.
    """

    sums: tuple[float, float, float]
    norm: float
    finite: bool
    pieces: int


@dataclass(frozen=True)
class Pending:
    """An update under way. figures [4], on the CPU when `ready`: sums and norm of `Outcome`; rate:
    of learning."""

    figures: Tensor
    rate: float
    pieces: int
    ready: torch.cuda.Event | None

    def read(self) -> Outcome:
        """What it did, when it is done."""
        if self.ready is not None:
            self.ready.synchronize()
        smoothed, nll, correct, norm = self.figures.tolist()
        return Outcome((smoothed, nll, correct), norm, math.isfinite(norm), self.pieces)


class Updater:
    """Model, optimiser and what stands between them."""

    def __init__(
        self, config: RunConfig, model: Transformer, world: World, locate: Callable[[int], str]
    ) -> None:
        """locate: file and line of a pair's number, for messages."""
        self.config, self.world, self.locate = config, world, locate
        losses = config.optim.label_smoothing, config.optim.rdrop
        self.parallel = parallel(
            config.train.parallel, model, world, lambda trained: StepModule(trained, *losses)
        )
        self.model, self.step = self.parallel.trained, self.parallel.step
        self.compiler = Compiler() if config.train.compile else None
        again = config.train.activation_checkpointing
        prepare_layers(self.model, world.device, self.compiler, again)
        self.optimizer = build_optimizer(self.model, config.optim)
        self._keeps_gradients = world.device.type == "cpu" and world.size == 1
        if self._keeps_gradients:
            reserve_memory(self.optimizer)
        self.dtype = training_type(config.train.precision, world.device)
        self.scaler = torch.amp.GradScaler(world.device.type, enabled=self.dtype == torch.float16)
        decay = config.train.ema
        parameters = dict(self.model.named_parameters())
        self.ema = None if decay is None else WeightAverage(parameters, decay)
        # Whether the optimiser's kernel is told on the device to leave an update out.
        self.deferred = world.device.type == "cuda"
        self._sums: list[Tensor] = []

    # ---- state -------------------------------------------------------------------------------

    def state(self) -> TrainState:
        """Tensors of the optimiser by parameter name, and the values of the loss scaler.

        Every rank must call it; where tensors are sharded, only rank 0 is given them.
        """
        tensors = {}
        for name, parameter in self.model.named_parameters():
            for key, value in self.optimizer.state.get(parameter, {}).items():
                tensors[f"{name}:{key}"] = value
        if self.ema is not None:
            tensors |= {f"{name}:{_EMA}": value for name, value in self.ema.weights.items()}
        keep = self.world.is_main or not self.parallel.sharded
        whole = gathered(self.parallel, tensors, keep)
        return TrainState(tensors=whole, values={"scaler": self.scaler.state_dict()})

    def restore(self, state: TrainState) -> None:
        """Go on from a saved state, with the weights that the model was given."""
        self.parallel.spread()
        if state.values["scaler"]:  # empty when the run was not in float16
            self.scaler.load_state_dict(state.values["scaler"])
        parameters = dict(self.model.named_parameters())
        for key, value in state.tensors.items():
            name, _, part = key.rpartition(":")
            parameter = parameters[name]
            if part == _EMA:
                assert self.ema is not None  # train.ema cannot change in a run
                self.ema.weights[name].copy_(self.parallel.like(parameter, value))
                continue
            # AdamW keeps its step counters on the CPU but where a fused kernel counts.
            counter = part == "step" and not self.optimizer.defaults["fused"]
            placed = value if counter else self.parallel.like(parameter, value)
            self.optimizer.state[parameter][part] = placed

    # ---- one update --------------------------------------------------------------------------

    def run(self, group: Sequence[Batch], divisor: int, update: int) -> Pending:
        """Update number `update` (from 1) on this rank's batches; divisor: target tokens of all.

        A batch that does not fit in memory is computed in pieces; TrainingError when a single pair
        does not fit, or when other processes would have to wait.
        """
        self.parallel.release()
        pieces = self._gradients(group, divisor, update)
        self.scaler.unscale_(self.optimizer)
        norm = self.parallel.whole(gradient_norm(self.model.parameters()))
        rate = learning_rate(update, self.config.optim, self.config.train.max_steps)
        set_learning_rate(self.optimizer, rate)
        if self.deferred or math.isfinite(norm.item()):
            self._step(norm)
        if self.ema is not None:
            self.ema.add(update)
        self.scaler.update()
        pending = self._pending(norm, rate, pieces)
        self._forget()
        return pending

    def _step(self, norm: Tensor) -> None:
        """Change the weights; a deferred step looks itself whether the norm is finite."""
        if self.config.optim.clip_norm is not None:
            clip_gradients(self.model.parameters(), norm, self.config.optim.clip_norm)
        if self.deferred:
            step_if_finite(self.optimizer, norm)
        else:
            self.scaler.step(self.optimizer)

    def _pending(self, norm: Tensor, rate: float, pieces: int) -> Pending:
        """The figures, on their way to the CPU."""
        sums = torch.stack(self._sums)
        if not self.deferred:
            sums, norm = sums.cpu(), norm.cpu()
        figures = torch.cat((sums.double().sum(0), norm.double()[None]))
        figures = figures.to("cpu", non_blocking=True)
        on_gpu = self.world.device.type == "cuda"
        ready = torch.cuda.current_stream(self.world.device).record_event() if on_gpu else None
        return Pending(figures, rate, pieces, ready)

    def ema_weights(self) -> dict[str, Tensor] | None:
        """The running mean of the weights by parameter name, if one is kept, on every rank."""
        return None if self.ema is None else gathered(self.parallel, self.ema.weights, True)

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
                    f"{', ...' if rows > 3 else ''}). {self._room()}"
                )
            # A backward that was cut short has left gradients behind: all of it once more.
            self._forget()
            if self.world.device.type == "cuda":
                torch.cuda.empty_cache()
            pieces *= 2
        return pieces

    def _room(self) -> str:
        """What makes room: first what a run that has begun can still change."""
        ways = {
            "train.activation_checkpointing: true": self.config.train.activation_checkpointing,
            "train.parallel: fsdp": self.world.size == 1 or self.parallel.sharded,
        }
        left = " and ".join(way for way, taken in ways.items() if not taken)
        first = f"Go on with {left}; or lower" if left else "Lower"
        return (
            f"{first} train.batch_tokens and raise train.accumulate instead, and start with "
            "--fresh: the plan of the batches changes."
        )

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
        most = cells_at_once(self.config, self.world.device, self.parallel.sharded)
        return list(batch.parts(-(-min(cells, most) // pieces)))

    def _backward(self, batch: Batch, divisor: int, last: bool) -> None:
        inputs = self._inputs(batch)
        with self.parallel.backward(last):
            with self._precision():
                sums = self.step(*inputs)
            # Gradients are averaged over ranks; the divisor already counts all of them.
            loss = sums.smoothed * (self.world.size / divisor)
            self.scaler.scale(loss).backward()
        self._sums.append(torch.stack((sums.smoothed.detach(), sums.nll, sums.correct)))

    def _precision(self) -> AbstractContextManager[object]:
        """Context of the forward pass: compiled code knows PyTorch's own alone."""
        how = training_precision if self.compiler is None else autocast
        return how(self.world.device, self.dtype)

    def _inputs(self, batch: Batch) -> tuple[Tensor, ...]:
        """What `StepModule` takes, on its way to the device; padded for compiled code."""
        pad = self.model.pad_id
        inputs = [batch.source, batch.target_in, batch.target_out]
        if self.compiler is not None:
            inputs = [padded(side, pad) for side in inputs]
        inputs.append(real_rows(inputs[2], pad))
        if self.world.device.type == "cuda":
            inputs = [tensor.pin_memory() for tensor in inputs]
        return tuple(tensor.to(self.world.device, non_blocking=True) for tensor in inputs)
