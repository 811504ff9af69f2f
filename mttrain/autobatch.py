"""`train.batch_tokens: auto`: a short probe finds the batch, before a run plans its first one.

On a GPU larger batches are faster until memory ends, so the largest safe one is sought: real
updates on batches of the longest pairs and of usual ones, all filled to the brim, while the
allocator's peak stays below a share of what was free; the next size follows from the line through
the last two. Elsewhere batches are computed in parts that fit the caches, so memory hardly grows
with the batch, and the one of most tokens per second is sought; a larger one must be faster by a
margin, because it also makes fewer updates of the same text.

An epoch keeps at least `FEWEST_UPDATES` updates. The model that is trained here is thrown away.

Price: on a GPU some ten updates; on a CPU two seconds for each size, more where an update is slow,
but no size is tried whose update would take more than `_LONGEST` seconds.
"""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from mttrain.batching import plan_epoch
from mttrain.config import RunConfig, with_batch_tokens
from mttrain.dataset import Batch, Example, TranslationDataset, collate
from mttrain.distributed import World
from mttrain.errors import ConfigError, TrainingError
from mttrain.memory import readable
from mttrain.model import Transformer
from mttrain.tokenizer import EOS_ID
from mttrain.update import Updater

LEAST, STEP = 512, 256  # smallest batch that is tried, and what all are multiples of
FEWEST_UPDATES = 10  # of an epoch
SAFE = 0.85  # share of the free memory of a GPU: lengths vary, and an allocator leaves holes
MARGIN = 1.03  # by how much a larger batch must be faster
_LARGEST_CPU = 16384
_SECONDS, _LONGEST = 2.0, 10.0  # of the updates of one size together; of one update at most
_SAMPLE = 20_000  # pairs whose lengths stand for all
_GROUP = 4  # batches of a probed update, at most


@dataclass
class Found:
    """The batch, what decided about it, and what was tried: tokens, and bytes or tokens/s each."""

    batch_tokens: int
    by: str
    trials: list[tuple[int, float]] = field(default_factory=list)

    def text(self) -> str:
        """One line for the console."""
        shown = (
            f"{tokens}: {'too large' if value <= 0 else self._shown(value)}"
            for tokens, value in self.trials
        )
        tried = f" ({', '.join(shown)})" if self.trials else ""
        return f"train.batch_tokens auto: {self.batch_tokens}, by {self.by}{tried}"

    def _shown(self, value: float) -> str:
        return readable(value) if self.by == "memory" else f"{value:.0f} tokens/s"


def resolve_batch_tokens(
    config: RunConfig, dataset: TranslationDataset, vocab: tuple[int, int], world: World
) -> tuple[RunConfig, Found]:
    """The configuration with a number in place of auto, the same on all processes.

    vocab: sizes of both vocabularies. ConfigError when no batch fits in memory.
    """
    lengths = dataset.lengths(0)
    most = largest_useful(config, *lengths, world.size)
    if most <= LEAST:
        found = Found(most, "the size of the corpus")
    else:
        probe = _Probe(config, lengths, vocab, world.device)
        try:
            if world.device.type == "cuda":
                found = _by_memory(probe, most, world)
            else:
                found = _by_speed(probe, most, world)
        finally:
            probe.close()
    return with_batch_tokens(config, found.batch_tokens), found


def largest_useful(
    config: RunConfig, source: NDArray[np.int32], target: NDArray[np.int32], processes: int
) -> int:
    """The batch with which an epoch of pairs of these lengths has `FEWEST_UPDATES` updates."""
    cells = int(np.maximum(source, target).sum(dtype=np.int64))
    batches = FEWEST_UPDATES * config.train.accumulate * processes
    return max(LEAST, _rounded(cells / batches))


def _rounded(tokens: float) -> int:
    return int(tokens) // STEP * STEP


# ---- the two searches --------------------------------------------------------------------------


def _by_memory(probe: _Probe, most: int, world: World) -> Found:
    """Each process searches alone, without waiting for another that has run out of memory; the
    smallest of what they find holds."""
    limit = probe.memory_limit(world)
    trials: list[tuple[int, float]] = []

    def peak(tokens: int) -> int | None:
        used = probe.peak(tokens)
        trials.append((tokens, float(used or 0)))
        return used

    own = largest_safe(peak, limit, most)
    all_found = [0.0] * world.size
    all_found[world.rank] = float(own or 0)
    smallest = int(min(world.sum(all_found)))
    if not smallest:
        raise ConfigError(
            f"train.batch_tokens auto: not even a batch of {LEAST} tokens fits in the "
            f"{readable(limit)} that are safe to use; take a smaller model or data.max_length."
        )
    return Found(smallest, "memory", trials)


def largest_safe(peak_of: Callable[[int], int | None], limit: int, most: int) -> int | None:
    """The largest batch, in steps and to about a tenth, whose peak is at most `limit` bytes.

    peak_of: bytes that a batch of so many tokens takes at most, None when it did not fit. None: not
    even the smallest is safe. Memory grows with the batch, roughly along a line.
    """
    good: list[tuple[int, int]] = []  # sizes that are safe, and their peaks
    bad, size = most + STEP, min(LEAST, most)
    while True:
        used = peak_of(size)
        if used is not None and used <= limit:
            good.append((size, used))
        else:
            bad = size
        if not good:
            return None
        best = good[-1][0]
        size = min(_next_size(good, limit), most)
        if size >= bad:  # the line says more than a trial did: between the two
            size = _rounded((best + bad) / 2)
        if size <= best or size - best < best // 10:
            return best


def _next_size(good: list[tuple[int, int]], limit: int) -> int:
    """Where the line through the last two safe sizes meets the limit, at most four times as far."""
    size, used = good[-1]
    if len(good) == 1:
        return 2 * size
    before, less = good[-2]
    slope = (used - less) / (size - before)
    reach = size + (limit - used) / slope if slope > 0 else 4 * size
    return _rounded(min(4 * size, reach))


def _by_speed(probe: _Probe, most: int, world: World) -> Found:
    """All processes try the same sizes, since what they find is added up after each."""
    found = Found(0, "speed")

    def speed(tokens: int) -> float:
        total = world.sum([probe.speed(tokens)])[0]
        found.trials.append((tokens, total))
        return total

    cells = 2 * probe.accumulate * world.size  # of an update, for each token of a batch
    found.batch_tokens = fastest(speed, min(most, _LARGEST_CPU), _LONGEST / cells)
    return found


def fastest(speed_of: Callable[[int], float], most: int, longest: float = math.inf) -> int:
    """The batch of most tokens per second among doubled sizes up to `most`.

    A larger one must be faster by `MARGIN`; two in a row that are not end the search, and so does a
    size that would take more than `longest` seconds at the speed of the last.
    """
    best, top, speed, worse, size = 0, 0.0, math.inf, 0, LEAST
    while size <= most and worse < 2 and size <= longest * speed:
        speed = speed_of(size)
        if speed > MARGIN * top:
            best, top, worse = size, speed, 0
        else:
            worse += 1
        size *= 2
    return best


# ---- measuring ---------------------------------------------------------------------------------


class _Probe:
    """A model and an optimiser of their own, in one process, that are thrown away."""

    def __init__(
        self,
        config: RunConfig,
        lengths: tuple[NDArray[np.int32], NDArray[np.int32]],
        vocab: tuple[int, int],
        device: torch.device,
    ) -> None:
        self.config, self.vocab, self.device = config, vocab, device
        self.accumulate = min(config.train.accumulate, _GROUP)
        chosen = np.unique(np.linspace(0, len(lengths[0]) - 1, _SAMPLE).astype(np.int64))
        self.source, self.target = (side[chosen] for side in lengths)
        # A trap for the allocator are the longest pairs, wherever they stand.
        self.longest = max(int(side.max()) for side in lengths)
        self.usual = int(np.median(np.maximum(self.source, self.target)))
        self.model = Transformer(config.model, *vocab).to(device).train()
        self.free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else 0
        self.updater = Updater(config, self.model, World(0, 1, device), lambda _: "a probed pair")
        self.updates = 0

    def close(self) -> None:
        """Let go of the memory."""
        del self.model, self.updater
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def memory_limit(self, world: World) -> int:
        """Bytes that the allocator may hold at most: a share of what it has and what is free."""
        share = SAFE * (self.free + torch.cuda.memory_reserved(self.device))
        # The first update of several processes has the gradients twice, in buckets, too.
        twice = sum(p.nbytes for p in self.model.parameters()) if world.size > 1 else 0
        return int(share) - twice

    def peak(self, tokens: int) -> int | None:
        """Bytes that the allocator of a GPU takes for updates of this size, None: not enough."""
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(self.device)
        for length in (self.longest, self.usual):
            full = [length] * max(1, tokens // length)
            batch = self._batch(full, full)
            if not self._update([batch] * min(self.accumulate, 2)):
                return None
        return torch.cuda.max_memory_reserved(self.device)

    def speed(self, tokens: int) -> float:
        """Tokens of both sides, without padding, per second of updates of this size."""
        plan = plan_epoch(self.config.seed, 0, self.source, self.target, batch_tokens=tokens)
        done, number, spent = 0, 0, 0.0
        while number < 2 or spent < _SECONDS:
            first = number * self.accumulate
            places = (plan.batch((first + i) % len(plan)) for i in range(self.accumulate))
            group = [self._batch(self.source[rows], self.target[rows]) for rows in places]
            start = time.perf_counter()
            self._update(group)  # waits for the device, since it returns the norm of the gradient
            if number:  # the first one prepares kernels and memory
                spent += time.perf_counter() - start
                done += sum(batch.source_tokens + batch.target_tokens for batch in group)
            number += 1
        return done / spent

    def _update(self, group: list[Batch]) -> bool:
        """One update; whether its batches fitted in memory as they are."""
        self.updates += 1
        divisor = sum(batch.target_tokens for batch in group)
        try:
            return self.updater.run(group, divisor, self.updates).pieces == 1
        except TrainingError:  # not even one pair fits
            return False

    def _batch(self, source: Any, target: Any) -> Batch:
        """Pairs of these lengths, of random tokens."""
        chance = np.random.default_rng(self.updates)

        def ids(length: int, vocab: int) -> NDArray[np.uint32]:
            return np.append(chance.integers(4, vocab, length - 1), EOS_ID).astype(np.uint32)

        pairs = zip(source, target, strict=True)
        return collate([Example(ids(s, self.vocab[0]), ids(t, self.vocab[1]), 0) for s, t in pairs])
