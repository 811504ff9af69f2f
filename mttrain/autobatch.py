"""`train.batch_tokens: auto`: a short probe finds the batch, before a run plans its first one.

On a GPU larger batches are faster until memory ends, so the largest safe one is sought: real
updates on batches of the longest pairs and of usual ones, all filled to the brim, while the
allocator's peak stays below a share of what was free; the next size follows from the line through
the last two. Elsewhere batches are computed in parts that fit the caches, so memory hardly grows
with the batch, and the one of most tokens per second is sought: from a small size on, each is
compared with its double, in turns, since what else the machine does slows both then, and by the
median of the turns. A larger one must be faster by a margin, because it also makes fewer updates of
the same text.

An epoch keeps at least `FEWEST_UPDATES` updates. The model that is trained here is thrown away.

Price: on a GPU some ten updates; on a CPU three seconds for each size, up to four times as many
where an update is slow, but no size is tried whose update would take more than `_LONGEST` seconds.
"""

from __future__ import annotations

import gc
import itertools
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
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
from mttrain.machine import free_memory, out_of_memory
from mttrain.memory import readable
from mttrain.model import Transformer
from mttrain.tokenizer import EOS_ID
from mttrain.update import Updater

LEAST, STEP = 512, 256  # smallest batch that is tried, and what all are multiples of
FEWEST_UPDATES = 10  # of an epoch
SAFE = 0.85  # share of the free memory of a GPU: lengths vary, and an allocator leaves holes
MARGIN = 1.03  # by how much a larger batch must be faster
_LARGEST_CPU = 16384
_SECONDS, _LONGEST = 3.0, 5.0  # of a comparison of two sizes, at least; of one update, at most
_TURNS, _ENOUGH = 3, 8.0  # turns of a comparison; seconds after which fewer will do
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
        shown = readable if self.by == "memory" else "{:.0f} tokens/s".format
        tried = (f"{size}: {shown(found) if found else 'too large'}" for size, found in self.trials)
        text = f"train.batch_tokens auto: {self.batch_tokens}, by {self.by}"
        return f"{text} ({', '.join(tried)})" if self.trials else text


def resolve_batch_tokens(
    config: RunConfig,
    dataset: TranslationDataset,
    vocab: tuple[int, int],
    world: World,
    processes: int,
) -> tuple[RunConfig, Found]:
    """The configuration with a number in place of auto, the same on all processes.

    vocab: sizes of both vocabularies; processes: that will train; a dry run is one alone.
    ConfigError when no batch fits in memory.
    """
    lengths = dataset.lengths(0)
    cells = np.maximum(*lengths)
    epoch = cells.sum(dtype=np.int64) if dataset.weights is None else cells @ dataset.weights
    most = largest_useful(config, int(epoch), processes)
    if most < 2 * LEAST:
        found = Found(most, "the size of the corpus")
    else:
        search = _by_memory if world.device.type == "cuda" else _by_speed
        with closing(_Probe(config, lengths, vocab, world.device, processes)) as probe:
            found = search(probe, most, world)
    return with_batch_tokens(config, found.batch_tokens), found


def largest_useful(config: RunConfig, cells: int, processes: int) -> int:
    """The batch with which an epoch has `FEWEST_UPDATES` updates, but `LEAST` tokens; cells:
    lengths of the longer sides of all its pairs together, each as often as an epoch has it."""
    batches = FEWEST_UPDATES * config.train.accumulate * processes
    return max(LEAST, _rounded(cells / batches))


def _rounded(tokens: float) -> int:
    return int(tokens) // STEP * STEP


# ---- the two searches --------------------------------------------------------------------------


def _by_memory(probe: _Probe, most: int, world: World) -> Found:
    """Each process searches alone, without waiting for another that has run out of memory; the
    smallest of what they find holds."""
    limit = probe.memory_limit()
    trials: list[tuple[int, float]] = []

    def peak(tokens: int) -> int | None:
        used = probe.peak(tokens)
        trials.append((tokens, float(used or 0)))
        return used

    own = largest_safe(peak, limit, most)
    smallest = int(-world.largest(-float(own or 0)))
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
    """All processes try the same sizes, since what they find is added up after each comparison."""
    tried: dict[int, float] = {}

    def speeds(sizes: tuple[int, int]) -> list[float]:
        found = world.sum(in_turns([probe.turns(size, max(sizes)) for size in sizes]))
        tried.update(zip(sizes, found, strict=True))
        return found

    cells = 2 * probe.accumulate * world.size  # of an update, for each token of a batch
    best = fastest(speeds, min(most, _LARGEST_CPU), _LONGEST / cells)
    return Found(best, "speed", list(tried.items()))


def fastest(
    speeds_of: Callable[[tuple[int, int]], Sequence[float]], most: int, longest: float = math.inf
) -> int:
    """The batch of most tokens per second among doubled sizes up to `most`.

    speeds_of: tokens per second of two sizes, measured beside each other. The larger one must be
    faster by `MARGIN`; two in a row that are not end the search, and so does a size that would take
    more than `longest` seconds at the speed of the last.
    """
    best, speed, worse, size = LEAST, math.inf, 0, 2 * LEAST
    while size <= most and worse < 2 and size <= longest * speed:
        least, speed = speeds_of((best, size))
        if speed > MARGIN * least:
            best, worse = size, 0
        else:
            worse += 1
        size *= 2
    return best


def in_turns(competitors: Sequence[Iterator[float]]) -> list[float]:
    """The median of what each gives when they take turns, A B A B A B; the first values, which
    prepare kernels and memory, do not count."""
    for competitor in competitors:
        next(competitor)
    turns: list[list[float]] = []
    start, spent = time.perf_counter(), 0.0
    while spent < _SECONDS or (len(turns) < _TURNS and spent < _ENOUGH):
        turns.append([next(competitor) for competitor in competitors])
        spent = time.perf_counter() - start
    found: list[float] = np.median(turns, axis=0).tolist()
    return found


# ---- measuring ---------------------------------------------------------------------------------


class _Probe:
    """A model and an optimiser of their own, in one process, that are thrown away."""

    def __init__(
        self,
        config: RunConfig,
        lengths: tuple[NDArray[np.int32], NDArray[np.int32]],
        vocab: tuple[int, int],
        device: torch.device,
        processes: int = 1,
    ) -> None:
        self.config, self.vocab, self.device = config, vocab, device
        self.processes = processes
        self.accumulate = min(config.train.accumulate, _GROUP)
        chosen = np.unique(np.linspace(0, len(lengths[0]) - 1, _SAMPLE).astype(np.int64))
        self.source, self.target = (side[chosen] for side in lengths)
        # A trap for the allocator are the longest pairs, wherever they stand. Other segmentations
        # of them may be as long as the rules allow.
        self.longest = max(int(side.max()) for side in lengths)
        if config.tokenizer.dropout > 0:
            self.longest = max(self.longest, config.data.max_length)
        self.usual = int(np.median(np.maximum(self.source, self.target)))
        self.model = Transformer(config.model, *vocab).to(device).train()
        self.updater = Updater(config, self.model, World(0, 1, device), lambda _: "a probed pair")
        self.updates = 0

    def close(self) -> None:
        """Let go of the memory."""
        del self.model, self.updater
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def memory_limit(self) -> int:
        """Bytes that the allocator may hold at most: a share of what it has and what is free."""
        held = torch.cuda.memory_reserved(self.device)
        share = SAFE * (held + free_memory(self.device))
        # The first update of several processes has the gradients twice, in buckets, too.
        twice = sum(p.nbytes for p in self.model.parameters()) if self.processes > 1 else 0
        return int(share) - twice

    def peak(self, tokens: int) -> int | None:
        """Bytes that the allocator of a GPU takes for updates of this size, None: not enough."""
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(self.device)
        # The first update of all makes the moments, which the longest pairs then find in place.
        for length in (self.usual, self.longest):
            full = [length] * max(1, tokens // length)
            batch = self._batch(full, full)
            if not self._update([batch] * min(self.accumulate, 2)):
                return None
        return torch.cuda.max_memory_reserved(self.device)

    def turns(self, tokens: int, turn: int) -> Iterator[float]:
        """Tokens of both sides, without padding, per second of updates with batches of this size:
        of one update, then of turns with batches of `turn` tokens together."""
        plan = plan_epoch(self.config.seed, 0, self.source, self.target, batch_tokens=tokens)
        batches = map(plan.batch, itertools.cycle(range(len(plan))))
        for count in itertools.chain([1], itertools.repeat(max(1, turn // tokens))):
            done, spent = 0, 0.0
            for _ in range(count):
                rows = itertools.islice(batches, self.accumulate)
                group = [self._batch(self.source[at], self.target[at]) for at in rows]
                start = time.perf_counter()
                fits = self._update(group)  # waits for the device: it returns the gradient's norm
                spent += time.perf_counter() - start
                done += fits * sum(batch.source_tokens + batch.target_tokens for batch in group)
            yield done / spent

    def _update(self, group: list[Batch]) -> bool:
        """One update; whether its batches fitted in memory as they are."""
        self.updates += 1
        divisor = sum(batch.target_tokens for batch in group)
        try:
            return self.updater.run(group, divisor, self.updates).pieces == 1
        except TrainingError:  # not even one pair fits
            return False
        except (RuntimeError, MemoryError) as error:  # or the moments do not
            if not out_of_memory(error):
                raise
            return False

    def _batch(self, source: Any, target: Any) -> Batch:
        """Pairs of these lengths, of random tokens."""
        chance = np.random.default_rng(self.updates)

        def ids(length: int, vocab: int) -> NDArray[np.uint32]:
            return np.append(chance.integers(4, vocab, length - 1), EOS_ID).astype(np.uint32)

        pairs = zip(source, target, strict=True)
        return collate([Example(ids(s, self.vocab[0]), ids(t, self.vocab[1]), 0) for s, t in pairs])
