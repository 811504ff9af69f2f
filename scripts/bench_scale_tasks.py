"""The tasks of bench_scale.py, each in a process of its own.

    python scripts/bench_scale_tasks.py TASK WORK ARGUMENTS      (JSON; prints JSON)

The text is made of invented words. A line has 6 to some 60 of them, 20 on average; which word comes
is drawn by Zipf's law, as in texts, from 200,000, and now and then there is a number. The
translation has the words that stand for them in another invented language, in another order. All of
it is a function of the size alone.
"""

from __future__ import annotations

import gzip
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from bench_setup import BenchError

WORDS = 200_000
BLOCK = 20_000  # pairs generated at a time
LEARN_FROM = 200_000  # lines of both sides for the vocabulary
VALID = 20  # pairs
LONGEST = 256  # data.max_length, its default


# ---- memory -----------------------------------------------------------------------------------


def resident_mb(process: int | str = "self", *, kinds: Sequence[str] = ("VmRSS",)) -> float:
    """Memory of one process, in MB; 0 when it has ended."""
    try:
        lines = Path(f"/proc/{process}/status").read_text(encoding="ascii").splitlines()
    except OSError:
        return 0.0
    values = dict(line.split(":", 1) for line in lines)
    return sum(int(values[kind].split()[0]) for kind in kinds if kind in values) / 1024


def descendants(process: int) -> Iterator[int]:
    """All processes below one."""
    for thread in Path(f"/proc/{process}/task").iterdir():
        try:
            children = (thread / "children").read_text(encoding="ascii").split()
        except OSError:
            continue
        for child in map(int, children):
            yield child
            try:
                yield from descendants(child)
            except OSError:
                continue


class Peak:
    """The largest memory of this process and all below it while the block runs, in MB.

    Libraries that processes share are counted for each of them: the true figure is smaller.
    """

    def __enter__(self) -> Peak:
        self.mb, self._stop = 0.0, threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        return self

    def _watch(self) -> None:
        while True:
            own = os.getpid()
            self.mb = max(self.mb, sum(map(resident_mb, [own, *descendants(own)])))
            if self._stop.wait(0.1):
                return

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()


# ---- text -------------------------------------------------------------------------------------


def uniform(words: np.random.PCG64, count: int) -> np.ndarray:
    """Numbers in [0, 1) that every numpy draws alike."""
    return (words.random_raw(count) >> np.uint64(11)).astype(np.float64) * 2.0**-53


def language(seed: int) -> list[str]:
    """Invented words: frequent ones are short."""
    words = np.random.PCG64(seed)
    begins = ["b", "d", "f", "g", "k", "l", "m", "n", "p", "r", "s", "st", "t", "tr", "v", "w", ""]
    middles = ["a", "e", "i", "o", "u", "ei", "au", "ü"]
    ends = ["", "", "n", "r", "s", "t", "ng"]
    syllables = [a + b + c for a in begins for b in middles for c in ends if a + c]
    drawn = (uniform(words, WORDS * 4) * len(syllables)).astype(int).reshape(WORDS, 4).tolist()
    sizes = np.minimum(1 + np.log2(1 + np.arange(WORDS)) / 6, 4).astype(int).tolist()
    return [
        "".join(syllables[i] for i in row[:size]) for row, size in zip(drawn, sizes, strict=True)
    ]


def sentences(pairs: int, shard: int) -> Iterator[tuple[list[str], list[str]]]:
    """The pairs of one shard, some at a time."""
    words = np.random.PCG64(np.random.SeedSequence((1, shard)))
    both = language(1), language(2)
    chances = 1.0 / (np.arange(WORDS) + 2.7)
    edges = np.cumsum(chances / chances.sum())
    for first in range(0, pairs, BLOCK):
        count = min(BLOCK, pairs - first)
        spread = uniform(words, 4 * count).reshape(4, count).mean(0)  # a bell from 0 to 1
        lengths = (6 + 54 * spread**2).astype(int)
        total = int(lengths.sum())
        which = np.searchsorted(edges, uniform(words, total)).clip(0, WORDS - 1)
        number = uniform(words, total)
        ends = np.cumsum(lengths).tolist()
        ids, digits = which.tolist(), (number * 2e6).astype(int).tolist()
        source, target = [], []
        begin = 0
        for end in ends:
            row = range(begin, end)
            one = [both[0][ids[i]] if digits[i] > 40_000 else str(digits[i]) for i in row]
            two = [both[1][ids[i]] if digits[i] > 40_000 else str(digits[i]) for i in row]
            source.append(" ".join(one) + " .")
            target.append(" ".join([*two[2:], *two[:2]]) + ".")
            begin = end
        yield source, target


def text(work: Path, pairs: int, shards: int, vocab: int, packed: bool) -> dict[str, Any]:
    """Write the corpus and its vocabulary, unless they are there."""
    from mttrain.tokenizer import train_tokenizer

    start, done = time.perf_counter(), work / "text.json"
    wanted = {"pairs": pairs, "shards": shards, "vocab": vocab, "packed": packed}
    if done.exists():
        if (found := json.loads(done.read_text()))["wanted"] != wanted:
            raise BenchError(f"{work} holds another corpus; name another --work")
        return {**found, "seconds": 0.0}
    writer = partial(gzip.open, compresslevel=1) if packed else open
    size = 0
    for shard in range(shards):
        count = pairs * (shard + 1) // shards - pairs * shard // shards
        names = [work / f"text-{shard:03}.{lang}{'.gz' * packed}" for lang in ("en", "de")]
        with writer(names[0], "wb") as one, writer(names[1], "wb") as two:
            for block in sentences(count, shard):
                for file, lines in zip((one, two), block, strict=True):
                    data = "".join(f"{line}\n" for line in lines).encode()
                    file.write(data)
                    size += len(data)
    for lang, lines in zip(("en", "de"), next(sentences(VALID, shards)), strict=True):
        (work / f"valid.{lang}").write_text("".join(f"{line}\n" for line in lines), "utf-8")
    learn: list[str] = []
    for block in sentences(min(LEARN_FROM, pairs), 0):
        learn += [*block[0], *block[1]]
    train_tokenizer(learn, vocab_size=vocab).save(work / "tokenizer.json")
    found = {"wanted": wanted, "mb": size / 1e6}
    done.write_text(json.dumps(found))
    return {**found, "seconds": time.perf_counter() - start}


def parallel(work: Path) -> Any:
    """The corpus as mttrain reads it."""
    from mttrain.pairs import ParallelText
    from mttrain.shards import matching

    packed = ".gz" if list(work.glob("text-*.en.gz")) else ""
    patterns = [str(work / f"text-*.{lang}{packed}") for lang in ("en", "de")]
    first, *more = zip(*matching(patterns), strict=True)
    return ParallelText(first, ("en", "de"), more=tuple(more))


def data_config(work: Path) -> Any:
    """The same as a section of a configuration."""
    from mttrain.config import DataConfig

    packed = ".gz" if list(work.glob("text-*.en.gz")) else ""
    names = ("text-*", packed), ("valid", "")
    train, valid = (
        {"source": str(work / f"{name}.en{end}"), "target": str(work / f"{name}.de{end}")}
        for name, end in names
    )
    return DataConfig(source_lang="en", target_lang="de", train=train, valid=valid)


# ---- tasks ------------------------------------------------------------------------------------


def bare_speed(
    text: Any, tokenizers: Sequence[Any], pairs: int, total: int, part: int
) -> list[float]:
    """Seconds of `encode_batch` alone and pairs, over blocks spread evenly over the text.

    Reading and decoding are not counted, and no id is taken out. part 0 takes every other one of
    the blocks, part 1 those between.
    """
    from mttrain.textblocks import PAIRS, decoded, text_blocks

    blocks = max(1, total // PAIRS)
    every = max(1, blocks // max(2, pairs // PAIRS))
    seconds, count, number = 0.0, 0, 0
    for shard in text.shards():
        for block in text_blocks(shard):
            number += 1
            if number % every or number // every % 2 != part:
                continue
            for tokenizer, lines in zip(tokenizers, decoded(block), strict=True):
                start = time.perf_counter()
                tokenizer._inner.encode_batch(lines, add_special_tokens=False)
                seconds += time.perf_counter() - start
            count += len(block.lines)
    return [seconds, count]


def encode(work: Path, bare: int) -> dict[str, Any]:
    """Make the store, between two halves of the bare speed; an earlier store is removed."""
    from mttrain.encoding import processes_for
    from mttrain.store import open_store
    from mttrain.tokenizer import Tokenizer

    tokenizers = (Tokenizer.load(work / "tokenizer.json"),) * 2
    corpus, total = parallel(work), json.loads((work / "text.json").read_text())["wanted"]["pairs"]
    for old in (work / "store").glob("*"):
        old.unlink()
    halves = [bare_speed(corpus, tokenizers, bare, total, 0)]
    rules = {"max_length": LONGEST, "max_ratio": None, "drop_duplicates": False}
    with Peak() as peak:
        start = time.perf_counter()
        store = open_store([corpus], tokenizers, "train", work / "store", rules=rules)
        seconds = time.perf_counter() - start
    halves.append(bare_speed(corpus, tokenizers, bare, total, 1))
    rates = [pairs / spent for spent, pairs in halves if pairs]
    rate = sum(rates) / len(rates)
    size = sum(os.stat(name).st_size for name in corpus.all_files())
    return {
        "seconds": seconds,
        "pairs_per_second": total / seconds,
        "bare_pairs_per_second": rate,
        "bare_halves": rates,
        "bare_pairs": sum(pairs for _, pairs in halves),
        "share": total / seconds / rate,
        "processes": processes_for(size),
        "peak_mb": peak.mb,
        "kept": len(store),
        "store_mb": sum(path.stat().st_size for path in (work / "store").iterdir()) / 1e6,
    }


def load(work: Path, epochs: int, batch_tokens: int, workers: int) -> dict[str, Any]:
    """Open the store again, plan epochs, and take all batches of them from the loader."""
    import torch  # its memory is not the loader's

    from mttrain.batching import TokenBatchSampler, plan_epoch
    from mttrain.dataset import TranslationDataset, batch_loader, encode_corpus
    from mttrain.tokenizer import Tokenizer

    torch.set_num_threads(1)
    tokenizers = (Tokenizer.load(work / "tokenizer.json"),) * 2
    start = time.perf_counter()
    store = encode_corpus(data_config(work), tokenizers, "train", work / "store")
    dataset = TranslationDataset(store)
    opened = time.perf_counter() - start
    if not store.reused:
        raise BenchError("the store was made again")
    plans: list[float] = []

    def plan(epoch: int) -> Any:
        begin = time.perf_counter()
        made = plan_epoch(1, epoch, *dataset.lengths(epoch), batch_tokens=batch_tokens)
        plans.append(time.perf_counter() - begin)
        return made

    with Peak() as peak:
        plan(epochs)
    sampler = TokenBatchSampler(plan)
    loader = batch_loader(dataset, sampler, workers=workers)
    anonymous = partial(resident_mb, kinds=("RssAnon", "RssShmem"))
    memory, batches, pairs, start = [anonymous()], 0, 0, time.perf_counter()
    for epoch in range(epochs):
        sampler.set_position(epoch)
        for batch in loader:
            batches += 1
            pairs += len(batch.indices)
        memory.append(anonymous())
    seconds = time.perf_counter() - start
    if pairs != epochs * len(dataset):
        raise BenchError(f"the loader gave {pairs} pairs, not {epochs * len(dataset)}")
    return {
        "open_seconds": opened,
        "plan_seconds": plans,
        "plan_peak_mb": peak.mb,
        "batches": batches // epochs,
        "seconds": seconds,
        "pairs_per_second": pairs / seconds,
        "memory_mb": memory,
    }


def main() -> int:
    """Run the task that is named."""
    tasks: dict[str, Callable[..., dict[str, Any]]] = {"text": text, "encode": encode, "load": load}
    try:
        found = tasks[sys.argv[1]](Path(sys.argv[2]), **json.loads(sys.argv[3]))
    except BenchError as error:
        print(error, file=sys.stderr)
        return 1
    print(json.dumps(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
