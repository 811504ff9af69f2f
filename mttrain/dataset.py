"""Encoded pairs as a dataset, and the batches made of them.

    B pairs of a batch   S, T longest source and target of the batch, in subwords, EOS included

A source is the tag of its corpus, if that has one, its subwords and EOS; a decoder input is BOS and
the subwords of the target; the decoder is to produce those subwords and EOS. Nothing is ever
cropped: pairs that break a rule are skipped as pairs, once, when the store is made. Which pairs
share a batch is the plan's affair (batching); here a batch costs one padded array per side, filled
in one assignment.
"""

from __future__ import annotations

import atexit
import ctypes
import multiprocessing
import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from mttrain.batching import EpochPlan, TokenBatchSampler, mixing_weights, plan_epoch
from mttrain.bpedropout import DroppingSide, EncodedSide, Ragged, WordSampler
from mttrain.config import CorpusConfig, DataConfig, RunConfig
from mttrain.flops import NO_WORK, LengthSums
from mttrain.pairs import parallel_text
from mttrain.store import EncodedCorpus, Split, open_store
from mttrain.storefiles import map_array
from mttrain.tokenizer import BOS_ID, EOS_ID, PAD_ID, Tokenizer

_SET_PARENT_DEATH_SIGNAL = 1  # prctl(2)


class Example(NamedTuple):
    """One encoded pair: source ids with EOS, target ids with EOS, and its number in the dataset."""

    source: NDArray[np.unsignedinteger[Any]]
    target: NDArray[np.unsignedinteger[Any]]
    number: int


class TranslationDataset(Dataset[Example]):
    """The pairs of a store, by number (from 0), with their lengths.

    source_lengths, target_lengths  [N] int32   subwords, EOS included
    pair_numbers                    [N] int64   line of the pair in its text files, from 1
    weights                         [N] float64 times per epoch, or None when all are 1
    """

    def __init__(
        self,
        store: EncodedCorpus,
        tokenizers: tuple[Tokenizer, Tokenizer] | None = None,
        dropout: float = 0.0,
        seed: int = 0,
    ) -> None:
        """dropout: of BPE merges, in the pairs that a loader gets of an epoch; for a store with
        words, with its tokenizers."""
        self.store = store
        self._drops = (tokenizers, dropout, seed)
        self._sides = [
            EncodedSide(
                map_array(store.part(f"{side}.tokens"), store.index["dtypes"][side]),
                map_array(store.part(f"{side}.offsets"), "int64"),
            )
            for side in ("source", "target")
        ]
        self.source_lengths, self.target_lengths = self.lengths(0)  # without dropout
        if dropout > 0:
            assert tokenizers is not None, "BPE-dropout needs the merges"
            longest = store.index["rules"]["max_length"]
            for place, side in enumerate(("source", "target")):
                plain = self._sides[place]
                # A seed of its own for each side of each run.
                words = _words(store, side, tokenizers[place], dropout, 2 * seed + place)
                self._sides[place] = DroppingSide(plain.tokens, plain.offsets, words, longest)
        self.pair_numbers = map_array(store.part("lines"), "int64")
        self.weights: NDArray[np.float64] | None = None
        if store.mixed:
            pairs = [corpus["pairs"] for corpus in store.index["corpora"]]
            self.weights = np.repeat(np.asarray(store.weights, dtype=np.float64), pairs)

    def __len__(self) -> int:
        return len(self.source_lengths)

    def __getitem__(self, index: int) -> Example:
        source, target = (side.row(index) for side in self._sides)
        return Example(source, target, index)

    def __getitems__(self, places: list[tuple[int, int]]) -> list[Example]:
        """The pairs of a batch, named by (epoch, number), as they are cut in that epoch."""
        if not places:
            return []
        epochs, numbers = zip(*places, strict=True)
        rows = [side.rows(epochs[0], np.array(numbers)) for side in self._sides]
        return [Example(*three) for three in zip(*rows, numbers, strict=True)]

    def lengths(self, epoch: int) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        """Of all sources and targets, as they are cut in that epoch; EOS included."""
        source, target = (side.lengths(epoch) for side in self._sides)
        return source, target

    def locate(self, index: int) -> str:
        """Where pair `index` stands: "file of the source, line N"."""
        line, first = int(self.pair_numbers[index]), 0
        for corpus in self.store.index["corpora"]:
            first += corpus["pairs"]
            if index < first:
                return f"{corpus['files'][0]}, line {line}"
        raise IndexError(index)

    def __reduce__(self) -> tuple[type[TranslationDataset], tuple[Any, ...]]:
        # A loader worker started by spawn maps the files again instead of receiving their content.
        return TranslationDataset, (self.store, *self._drops)


def _words(
    store: EncodedCorpus, side: str, tokenizer: Tokenizer, dropout: float, seed: int
) -> WordSampler:
    """The words of one side of a store that holds them."""

    def table(values: str, starts: NDArray[np.int64]) -> Ragged:
        return Ragged(map_array(store.part(f"{side}.{values}"), "uint32"), starts)

    counts = map_array(store.part(f"{side}.word_counts"), "int64")
    starts = np.concatenate(([0], np.cumsum(counts)))
    types = table("types", map_array(store.part(f"{side}.type_offsets"), "int64"))
    return WordSampler(tokenizer, types, table("words", starts), dropout, seed)


def epoch_plan(config: RunConfig, dataset: TranslationDataset, epoch: int) -> EpochPlan:
    """The batches of an epoch (counted from 0) under these settings."""
    return plan_epoch(
        config.seed,
        epoch,
        *dataset.lengths(epoch),
        batch_tokens=config.train.padded_tokens,
        batch_size=config.train.batch_size,
        weights=dataset.weights,
    )


# ---- batches ----------------------------------------------------------------------------------


@dataclass(slots=True)
class Batch:
    """Padded tensors of B pairs, int64, PAD_ID behind the end of each row.

    source         [B, S]  subwords, EOS
    target_in      [B, T]  BOS, subwords
    target_out     [B, T]  subwords, EOS
    indices        B       pair numbers
    source_tokens, target_tokens   subwords with EOS, without padding
    work           sums over the lengths of the pairs, for the count of operations
    """

    source: Tensor
    target_in: Tensor
    target_out: Tensor
    indices: list[int]
    source_tokens: int
    target_tokens: int
    work: LengthSums = NO_WORK

    def to(self, device: torch.device | str) -> Batch:
        """The batch on another device; from pinned memory the copy does not wait."""
        return self._moved(lambda tensor: tensor.to(device, non_blocking=True))

    def parts(self, cells: int) -> Iterator[Batch]:
        """The same pairs in order, in even parts of some `cells` cells a side, or a row more.

        Each is cut to its own longest rows.
        """
        rows = self.source.shape[0]
        count = -(-rows * max(self.source.shape[1], self.target_out.shape[1]) // cells)
        if count <= 1 or rows <= 1:
            yield self
            return
        sides = [(side != PAD_ID).sum(1) for side in (self.source, self.target_out)]
        for chunk in torch.arange(rows).tensor_split(min(count, rows)):
            at = slice(int(chunk[0]), int(chunk[-1]) + 1)
            source, target = (lengths[at] for lengths in sides)
            s, t = int(source.max()), int(target.max())
            yield Batch(
                self.source[at, :s],
                self.target_in[at, :t],
                self.target_out[at, :t],
                self.indices[at],
                int(source.sum()),
                int(target.sum()),
            )

    def pin_memory(self) -> Batch:
        """The batch in page-locked memory; called by DataLoader(pin_memory=True)."""
        return self._moved(lambda tensor: tensor.pin_memory())

    def _moved(self, move: Callable[[Tensor], Tensor]) -> Batch:
        tensors = (move(self.source), move(self.target_in), move(self.target_out))
        return replace(self, source=tensors[0], target_in=tensors[1], target_out=tensors[2])


def collate(examples: Sequence[Example]) -> Batch:
    """Pad the pairs into one batch; no pairs give `empty_batch`."""
    if not examples:
        return empty_batch()
    sides = [example.source for example in examples], [example.target for example in examples]
    work = LengthSums.of(*([len(row) for row in side] for side in sides))
    source, _ = _pad(sides[0])
    target_out, filled = _pad(sides[1])
    target_in = np.full_like(target_out, PAD_ID)
    target_in[:, 0] = BOS_ID
    # Behind BOS come the ids one place later; where a row has ended that would be its EOS.
    np.copyto(target_in[:, 1:], target_out[:, :-1], where=filled[:, 1:])
    return Batch(
        torch.from_numpy(source),
        torch.from_numpy(target_in),
        torch.from_numpy(target_out),
        [example.number for example in examples],
        work.source,
        work.target,
        work,
    )


def empty_batch() -> Batch:
    """What a rank runs that has no pairs left: shapes [1, 1], and nothing for the loss to count.

    Source and decoder input hold a real symbol each, so that attention has something to look at;
    the only output position is padding.
    """
    source, target_in, target_out = (torch.tensor([[id]]) for id in (EOS_ID, BOS_ID, PAD_ID))
    return Batch(source, target_in, target_out, [], 0, 0)


def batch_loader(
    dataset: TranslationDataset,
    sampler: TokenBatchSampler,
    *,
    workers: int = 0,
    pin_memory: bool = False,
) -> DataLoader[Example]:
    """The batches of one rank, in the sampler's order whatever the number of worker processes.

    Workers live as long as the loader. `sampler.set_position` tells where the next iteration
    starts. The loader's random generator is its own: torch's global one is not touched.
    """
    if workers:
        _end_workers_at_exit()
    return DataLoader(
        dataset,
        batch_sampler=_Places(sampler),
        collate_fn=collate,
        num_workers=workers,
        persistent_workers=workers > 0,
        pin_memory=pin_memory,
        worker_init_fn=partial(_quiet_worker, os.getpid()),
        generator=torch.Generator(),
    )


class _Places:
    """The batches of a sampler, each pair with the epoch, which a worker would not know."""

    def __init__(self, sampler: TokenBatchSampler) -> None:
        self._sampler = sampler

    def __iter__(self) -> Iterator[list[tuple[int, int]]]:
        for batch in self._sampler:
            yield [(self._sampler.epoch, pair) for pair in batch]

    def __len__(self) -> int:
        return len(self._sampler)


@cache
def _end_workers_at_exit() -> None:
    """Kill the workers of a loader that an exit cuts short: torch and multiprocessing send them
    SIGTERM then, to which they are deaf, and the latter waits for ever."""

    def end() -> None:
        if hasattr(signal, "SIGCHLD"):
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # torch would tell of workers that died
        for process in multiprocessing.active_children():
            process.kill()

    atexit.register(end)


def _quiet_worker(parent: int, _: int) -> None:
    """Signals are the parent's affair: it stops its workers, and one traceback is enough.

    torchrun, Slurm and `timeout` send SIGTERM to the whole group; a worker that ended by it would
    take its parent along before the state is saved.

    A worker ends with its parent at once. torch's own look whether it is there, every five seconds,
    and take for it whoever is when they are ready: a kill before that left them for ever. Until it
    has ended, the thread that hands tensors over may see a parent that went away in mid-sentence.
    """
    sys.excepthook = _without_lost_parents
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_SET_PARENT_DEATH_SIGNAL, int(signal.SIGKILL))
        there = os.getppid() == parent
        if multiprocessing.get_start_method() == "forkserver":  # whose child it is, and which ends
            there = (process := multiprocessing.parent_process()) is None or process.is_alive()
        if not there:
            os._exit(1)


def _without_lost_parents(kind: type[BaseException], *rest: Any) -> None:
    """What a worker says of an error that nobody caught: nothing if a connection was cut."""
    if not issubclass(kind, EOFError | ConnectionError):
        sys.__excepthook__(kind, *rest)


def _pad(rows: Sequence[NDArray[Any]]) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Rows of ids -> ids [B, longest] int64 with padding, and where there is none [B, longest]."""
    lengths = np.fromiter(map(len, rows), dtype=np.int64, count=len(rows))
    filled = np.arange(lengths.max()) < lengths[:, None]
    padded = np.full(filled.shape, PAD_ID, dtype=np.int64)
    padded[filled] = np.concatenate(rows)
    return padded, filled


# ---- text -------------------------------------------------------------------------------------


def load_raw(corpus: CorpusConfig, data: DataConfig) -> tuple[list[str], list[str]]:
    """All source lines and all reference lines, as they are: what BLEU is computed on."""
    pairs = list(parallel_text(corpus, data).required_pairs())
    return [pair.source for pair in pairs], [pair.target for pair in pairs]


def encode_corpus(
    data: DataConfig,
    tokenizers: tuple[Tokenizer, Tokenizer],
    split: Split,
    directory: Path,
    *,
    words: bool = False,
    trusted: bool = False,
    progress: Callable[[int], None] | None = None,
    say: Callable[[str], None] | None = None,
) -> EncodedCorpus:
    """The store of a split in `directory`, made when there is none that fits; see `open_store`.

    Training pairs pass all rules of `data`. Of validation and test only blank and too long pairs
    are skipped, for the loss; `load_raw` keeps all of them. words: keep those of the training text,
    for BPE-dropout.
    """
    training = split == "train"
    rules: dict[str, Any] = {"max_length": data.max_length}
    if training:
        rules |= {"max_ratio": data.max_ratio, "drop_duplicates": data.drop_duplicates}
    store = open_store(
        [parallel_text(corpus, data) for corpus in _corpora(data, split)],
        tokenizers,
        split,
        directory,
        rules=rules,
        words=words and training,
        trusted=trusted,
        progress=progress,
        say=say,
    )
    if not training or data.temperature is None:
        return store
    groups = store.shards()
    pairs = [sum(store.index["corpora"][n]["pairs"] for n in group) for group in groups]
    given = [store.weights[group[0]] for group in groups]
    times = mixing_weights(pairs, given, data.temperature)
    spread = [time for time, group in zip(times, groups, strict=True) for _ in group]
    return replace(store, weights=tuple(spread))


def _corpora(data: DataConfig, split: Split) -> list[CorpusConfig]:
    if split == "train":
        return list(data.train)
    corpus = data.valid if split == "valid" else data.test
    assert corpus is not None, "no test set is configured"
    return [corpus]
