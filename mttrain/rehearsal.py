"""The dry run: what training would work on, what it needs, and how long it takes.

The model is trained for some updates on the first batches of the plan, by the loop that trains in
earnest, and thrown away. Times of longer work follow from the FLOPs of the model, which are known
of every pair: seconds of the probe / its FLOPs x FLOPs of an epoch. Validations, checkpoints and
the end are not in them. Under torchrun one process is tried, with the whole model, and its part of
an epoch counted; memory is estimated for each of the processes, as `train.parallel` shares it out.

Price: `PROBE_UPDATES` updates, or those of `PROBE_SECONDS` after the first `_WARM_UP`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch

from mttrain.batching import EpochPlan
from mttrain.config import RunConfig, TrainConfig
from mttrain.dataset import TranslationDataset, epoch_plan
from mttrain.distributed import World, training_type
from mttrain.flops import LengthSums, model_products
from mttrain.loop import Trainer
from mttrain.machine import free_memory
from mttrain.memory import (
    WIDE,
    BatchShape,
    Memory,
    Setting,
    attention_kernel,
    readable,
    training_memory,
)
from mttrain.model import Transformer
from mttrain.progress import Progress
from mttrain.runlog import RunLog
from mttrain.update import cells_at_once
from mttrain.utilisation import measured_peak

PROBE_UPDATES, PROBE_SECONDS = 20, 60
_WARM_UP = 2  # updates of the probe that are not timed
_NEVER = 1 << 40
_UNITS = (86400, "days", 3600, "h"), (3600, "h", 60, "min"), (60, "min", 1, "s")


@dataclass(frozen=True)
class Parts:
    """What a run is built of. done: how far the run in the directory has come; processes: that will
    train, of which this one is tried."""

    config: RunConfig
    dataset: TranslationDataset
    model: Transformer
    world: World
    log: RunLog
    done: Progress
    processes: int = 1

    @property
    def shards(self) -> int:
        """Processes that share one model."""
        return self.processes if self.config.train.parallel == "fsdp" else 1


def rehearse(parts: Parts) -> str:
    """Say and log what training would be; returns "dry_run", or the name of a signal."""
    log, dataset = parts.log, parts.dataset
    log.event("encoded", step=0, **dataset.store.report())
    if dataset.store.skipped:
        log.say(dataset.store.text())
    plan = epoch_plan(parts.config, dataset, 0)
    updates = -(-len(plan) // (parts.config.train.accumulate * parts.processes))
    _say_plan(parts, plan, updates)
    memory = estimated_memory(parts, plan, parts.shards)
    each = " on each process" if parts.processes > 1 else ""
    log.say(f"memory{each}, estimated: {memory.text()}; beside the program itself")
    log.event("memory", step=0, total=memory.total, **asdict(memory))
    return _probe(parts, plan, updates)


def _say_plan(parts: Parts, plan: EpochPlan, updates: int) -> None:
    tokens, padding = int(plan.target_tokens.sum()), plan.padding
    parts.log.say(
        f"an epoch: {len(plan)} batches, {updates} updates, {tokens:,} target tokens, "
        f"{100 * padding:.1f} % padding"
    )
    plain = {"batches": len(plan), "updates_per_epoch": updates, "target_tokens": tokens}
    parts.log.event("plan", step=0, **plain, padding=padding)
    steps = parts.config.train.max_steps
    if steps is not None:
        parts.log.say(f"train.max_steps {steps}: {steps / updates:.1f} epochs")


def estimated_memory(parts: Parts, plan: EpochPlan, shards: int) -> Memory:
    """Of the batch that takes most, on each of so many processes that share a model."""
    config, device = parts.config, parts.world.device
    on_cpu = device.type == "cpu"
    half = training_type(config.train.precision, device) != torch.float32
    found = []
    for shape in _largest(parts, plan):
        setting = Setting(
            config.model,
            parts.model.encoder.embed_tokens.num_embeddings,
            parts.model.lm_head.out_features,
            # On a CPU only the inputs of a product are kept in bfloat16: counted in full.
            narrow=2 if half and not on_cpu else WIDE,
            kernel=attention_kernel(config.model, on_cpu, shape),
            rdrop=config.optim.rdrop > 0,
            ema=config.train.ema is not None,
            shards=shards,
            recompute=config.train.activation_checkpointing,
            large_chunks=not on_cpu,
        )
        cells = cells_at_once(config, device, shards > 1)
        rows = max(1, cells // max(shape.source, shape.target))
        found.append(training_memory(setting, shape._replace(rows=min(shape.rows, rows))))
    return max(found, key=lambda memory: memory.total)


def _largest(parts: Parts, plan: EpochPlan) -> list[BatchShape]:
    """The batch of most positions and the one of most pairs of positions."""
    starts = np.sort(plan.begins)
    rows = np.diff(starts, append=len(plan.order))
    source, target = (
        np.maximum.reduceat(side[plan.order], starts).astype(np.int64)
        for side in parts.dataset.lengths(0)
    )
    sizes = rows * (source + target), rows * np.maximum(source, target) ** 2
    places = {int(np.argmax(size)) for size in sizes}
    return [BatchShape(int(rows[i]), int(source[i]), int(target[i])) for i in places]


# ---- the probe ---------------------------------------------------------------------------------


class _Kept(RunLog):
    """Keeps the records of updates, in place of a file."""

    def __init__(self) -> None:
        super().__init__(None, quiet=True)
        self.updates: list[dict[str, Any]] = []

    def event(self, kind: str, **fields: Any) -> None:
        """Keep it if it is about an update."""
        if kind == "train":
            self.updates.append(fields)


def _tried(parts: Parts) -> tuple[str, list[dict[str, Any]], int | None]:
    """Train for some updates: why that ended, their records, and bytes that a GPU held."""
    config, device = parts.config, parts.world.device
    rhythm = {"log_every": 1, "valid_every": _NEVER, "patience": None}

    def until(updates: int, seconds: int | None) -> RunConfig:
        limits = {"max_steps": updates, "max_epochs": None, "max_time": seconds}
        return config.model_copy(
            update={"train": config.train.model_copy(update={**limits, **rhythm})}
        )

    log = _Kept()
    trainer = Trainer(
        until(_WARM_UP, None),
        parts.model,
        parts.dataset,
        parts.world,
        log,
        on_validate=lambda progress: 0.0,
        on_save=lambda progress, improved: None,
    )
    parts.log.say(f"up to {PROBE_UPDATES} updates on {device}, to see how long training takes")
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    reason = trainer.run()  # compiling and the like, however long it takes
    if reason == "max_steps":
        trainer.config = until(PROBE_UPDATES, PROBE_SECONDS)
        trainer.progress.elapsed = 0.0
        reason = trainer.run()
    held = torch.cuda.max_memory_reserved(device) if device.type == "cuda" else None
    return reason, log.updates, held


def _probe(parts: Parts, plan: EpochPlan, updates_per_epoch: int) -> str:
    """Say what an epoch and all of training takes, by the FLOPs and the times of some updates."""
    config, device = parts.config, parts.world.device
    peak, how = measured_peak(parts.world, config.train.precision)
    reason, updates, held = "", list[dict[str, Any]](), None
    whole = estimated_memory(parts, plan, shards=1)
    if parts.shards > 1 and whole.total - whole.weights > free_memory(device):
        parts.log.say(f"{device} has no room for the whole model, so no update is tried")
    else:
        reason, updates, held = _tried(parts)
    if reason in ("SIGINT", "SIGTERM"):
        return reason
    lengths = (side[plan.order] for side in parts.dataset.lengths(0))
    vocab, rdrop = parts.model.lm_head.out_features, config.optim.rdrop > 0
    epoch_flops = model_products(config.model, vocab, rdrop=rdrop).training(LengthSums.of(*lengths))
    own_flops = epoch_flops / parts.processes
    found = {
        "parameters": parts.model.parameter_count(),
        "flops_per_token": round(epoch_flops / int(plan.target_tokens.sum())),
        "flops_per_epoch": epoch_flops,
        "peak_flops": peak,
        "peak_how": how,
        "memory_measured": held,
        "processes": parts.processes,
        **estimate(config.train, updates, own_flops, updates_per_epoch, parts.done),
    }
    parts.log.event("estimate", step=0, **found)
    for line in _lines(found):
        parts.log.say(line)
    return "dry_run"


def estimate(
    train: TrainConfig,
    updates: Sequence[Mapping[str, Any]],
    epoch_flops: float,
    updates_per_epoch: int,
    done: Progress,
) -> dict[str, Any]:
    """Times of an epoch and of all training that is left.

    updates: records of the probe, the first of which prepare kernels and memory and do not count;
    done: what is trained already. No updates, whose gradients were not finite, give None.
    """
    timed = updates[min(_WARM_UP, len(updates) - 1) :] if updates else []
    if not timed:
        return {"probe_updates": 0, "epoch_seconds": None, "seconds_left": None}
    times = [update["flops"] / update["flops_per_second"] for update in timed]
    seconds, flops = sum(times), sum(update["flops"] for update in timed)
    waited = sum(update["waiting"] * time for update, time in zip(timed, times, strict=True))
    epoch_seconds = seconds * epoch_flops / flops
    ends = {
        "max_steps": train.max_steps,
        "max_epochs": train.max_epochs and train.max_epochs * updates_per_epoch,
    }
    each = epoch_seconds / updates_per_epoch
    left = {name: each * max(0, end - done.update) for name, end in ends.items() if end is not None}
    if train.max_seconds is not None:
        left["max_time"] = max(0.0, train.max_seconds - done.elapsed)
    limit = min(left, key=lambda name: left[name])
    return {
        "probe_updates": len(timed),
        "probe_seconds": round(seconds, 3),
        "flops_per_second": flops / seconds,
        "waiting": round(waited / seconds, 4),
        "epoch_seconds": round(epoch_seconds, 2),
        "updates_done": done.update,
        "limit": limit,
        "seconds_left": round(left[limit], 2),
    }


def _lines(found: dict[str, Any]) -> Iterator[str]:
    """The same for the console."""
    yield (
        f"model FLOPs: {found['flops_per_token']:.3g} for each target token and its share of the "
        f"source, {found['flops_per_epoch']:.3g} an epoch, forward and backward"
    )
    if found["memory_measured"] is not None:
        yield f"memory, measured in this process: {readable(found['memory_measured'])}"
    if not found["probe_updates"]:
        yield "warning: no update has changed the weights, so times cannot be told"
        return
    speed, peak = found["flops_per_second"], found["peak_flops"]
    yield (
        f"{found['probe_updates']} updates at {speed / 1e9:,.1f} GFLOP/s, {100 * speed / peak:.0f} "
        f"% of what matrix products alone make here ({peak / 1e9:,.0f} GFLOP/s); "
        f"{100 * found['waiting']:.1f} % of the time waiting for data"
    )
    done = f" from update {found['updates_done']} on" if found["updates_done"] else ""
    others = ", nor what the processes say to each other" if found["processes"] > 1 else ""
    yield (
        f"an epoch takes {in_words(found['epoch_seconds'])}; all of it, to train.{found['limit']}"
        f"{done}, {in_words(found['seconds_left'])}, validations not counted{others}"
    )


def in_words(seconds: float) -> str:
    """Seconds in the two units that matter: 12.1 s, 3 min 20 s, 5 h 10 min, 2 days 4 h."""
    whole = math.ceil(seconds)
    for large, name, small, rest in _UNITS:
        if whole >= large:
            return f"{whole // large} {name} {whole % large // small} {rest}"
    return f"{seconds:.1f} s"
