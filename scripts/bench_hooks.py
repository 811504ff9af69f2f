"""What is hooked into mttrain's training loop to measure it: its log, its loader, its data."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import Dataset

import mttrain.loop
from mttrain.dataset import Example
from mttrain.runlog import RunLog
from mttrain.tokenizer import EOS_ID, SPECIAL


class Probe(RunLog):
    """A log that keeps nothing and calls `on_update(tokens)` after each update."""

    def __init__(self, on_update: Callable[[int], None]) -> None:
        super().__init__(None, quiet=True)
        self.on_update = on_update

    def event(self, kind: str, **fields: Any) -> None:
        if kind == "train":
            self.on_update(int(fields["target_tokens"]))


class Supply:
    """What the loader handed over: seconds waited for it, cells and tokens of both sides."""

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Count from here."""
        self.waited, self.cells, self.tokens = 0.0, [0, 0], [0, 0]

    def padding(self) -> list[float]:
        """Share of padding in the source and in the target."""
        return [
            round(1 - tokens / max(cells, 1), 4)
            for tokens, cells in zip(self.tokens, self.cells, strict=True)
        ]

    def watched(self, loader: Any) -> Any:
        """The loader, counted."""
        supply = self

        class Watched:
            def __iter__(self) -> Iterator[Any]:
                batches = iter(loader)
                while True:
                    start = time.perf_counter()
                    batch = next(batches, None)
                    supply.waited += time.perf_counter() - start
                    if batch is None:
                        return
                    supply.cells[0] += batch.source.numel()
                    supply.cells[1] += batch.target_out.numel()
                    supply.tokens[0] += batch.source_tokens
                    supply.tokens[1] += batch.target_tokens
                    yield batch

        return Watched()

    @contextmanager
    def hooked(self) -> Iterator[None]:
        """The training loop takes its batches through here."""
        former = mttrain.loop.batch_loader
        mttrain.loop.batch_loader = lambda *a, **k: self.watched(former(*a, **k))
        try:
            yield
        finally:
            mttrain.loop.batch_loader = former


class Synthetic(Dataset[Example]):
    """Pairs of random ids: `pairs` of them, all of one length, EOS included."""

    weights = None

    def __init__(self, pairs: int, length: int, vocab: int) -> None:
        draw = np.random.default_rng(1)
        self.ids = draw.integers(len(SPECIAL), vocab, (2, pairs, length), dtype=np.uint16)
        self.ids[:, :, -1] = EOS_ID
        self.source_lengths = self.target_lengths = np.full(pairs, length, dtype=np.int32)

    def __len__(self) -> int:
        return len(self.source_lengths)

    def lengths(self, epoch: int) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        """Of all pairs: the same in every epoch."""
        return self.source_lengths, self.target_lengths

    def locate(self, index: int) -> str:
        """Where the pair stands: nowhere."""
        return f"pair {index}"

    def __getitems__(self, places: list[tuple[int, int]]) -> list[Example]:
        return [Example(self.ids[0, pair], self.ids[1, pair], pair) for _, pair in places]
