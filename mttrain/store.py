"""Encoded parallel text on disk: subwords in flat files that are memory-mapped.

`open_store` reads the text files once, skips the pairs that a rule refuses (counting them, with
line numbers), and writes the subwords of the rest into one flat file per side, 2 bytes for each (4
when the vocabulary has more than 65,536 entries), and where each pair begins. The files carry a key
made of the path, size and modification time of the text files, of the tokenizers and of the rules:
while that is unchanged the next start only maps them, after a look at their checksums (module
`storefiles`), so that a damaged store is made again and never trained on.

Text is encoded in blocks by all cores (`encoding`) and written as it comes, in memory that does not
grow with the corpus; what a kill interrupts goes on where it was (`storewriter`).
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import shutil
import zlib
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from mttrain.corpus import atomic_write_text, sync_directory
from mttrain.encoding import (
    SIDES,
    BlockEncoder,
    EncoderLost,
    encoders,
    id_type,
    processes_for,
)
from mttrain.errors import DataError, WriteError
from mttrain.pairrules import PairRules
from mttrain.pairs import ParallelText
from mttrain.storefiles import (
    are_whole,
    fingerprints,
    left_over,
    maker,
    part_names,
    part_path,
    sweep,
)
from mttrain.storewriter import store_writer
from mttrain.tags import tag_token
from mttrain.textblocks import TextBlock, text_blocks
from mttrain.tokenizer import Tokenizer

Split = Literal["train", "valid", "test"]

SPLIT_NAMES = {"train": "training", "valid": "validation", "test": "test"}

_FORMAT = 3  # a store of another format is made anew


@dataclass(frozen=True, slots=True)
class EncodedCorpus:
    """A store on disk: `index_path` is its JSON, `index` the content of that, checked.

    `weights` has one number for each entry of the index (each shard): how many times an epoch holds
    its pairs.
    """

    index_path: Path
    index: dict[str, Any]
    weights: tuple[float, ...]
    reused: bool

    def __len__(self) -> int:
        return int(sum(corpus["pairs"] for corpus in self.index["corpora"]))

    def part(self, name: str) -> Path:
        """Path of one of the files beside the index."""
        return part_path(self.index_path, name)

    @property
    def skipped(self) -> dict[str, int]:
        """How many pairs each rule refused."""
        return {reason: seen["count"] for reason, seen in self.index["skipped"].items()}

    def report(self) -> dict[str, Any]:
        """For the log: pairs read, kept and skipped, with the first lines of each reason; and how
        many times an epoch holds each corpus, where that is not once."""
        corpora = self.index["corpora"]
        if self.mixed:
            pairs = zip(corpora, self.weights, strict=True)
            corpora = [{**corpus, "times": times} for corpus, times in pairs]
        return {
            "split": self.index["split"],
            "lines": sum(corpus["lines"] for corpus in corpora),
            "pairs": len(self),
            "skipped": self.index["skipped"],
            "corpora": corpora,
            "reused": self.reused,
        }

    def shards(self) -> list[list[int]]:
        """For each corpus the numbers of its entries in the index."""
        entries = range(len(self.index["corpora"]))
        corpus = lambda number: self.index["corpora"][number].get("corpus", -1 - number)  # noqa: E731
        return [list(numbers) for _, numbers in itertools.groupby(entries, corpus)]

    @property
    def mixed(self) -> bool:
        """Whether an epoch is anything but each pair once."""
        return any(weight != 1.0 for weight in self.weights)

    def mixture(self) -> str:
        """How often an epoch holds each corpus, for the console; empty where that is once."""
        if not self.mixed:
            return ""
        parts = []
        for shards in self.shards():
            corpus, times = self.index["corpora"][shards[0]], self.weights[shards[0]]
            # The directions of one file of pairs differ by their tags alone.
            name = corpus["files"][0] + (f" {tag_token(corpus['tag'])}" if "tag" in corpus else "")
            more = f" and {len(shards) - 1} more shards" if len(shards) > 1 else ""
            pairs = sum(self.index["corpora"][number]["pairs"] for number in shards)
            parts.append(f"{name}{more} {times:.4g} times ({round(pairs * times):,} pairs)")
        return f"an epoch holds {', '.join(parts)}"

    def text(self) -> str:
        """The same in one line for the console."""
        lines = sum(corpus["lines"] for corpus in self.index["corpora"])
        line = f"{SPLIT_NAMES[self.index['split']]}: {len(self)} of {lines} pairs"
        return f"{line}; skipped {_describe(self.index)}" if self.skipped else line


def text_hashes(*stores: EncodedCorpus) -> dict[str, str]:
    """SHA-256 of each text file of these stores, by its name.

    Of a file of pairs the sum covers the languages that a corpus reads: it has a sum for each
    reading.
    """
    found: dict[str, dict[str, None]] = {}
    for store in stores:
        for corpus in store.index["corpora"]:
            for name, digest in zip(corpus["files"], corpus["sha256"], strict=True):
                found.setdefault(name, {})[digest] = None
    return {name: " ".join(digests) for name, digests in found.items()}


def open_store(
    corpora: Sequence[ParallelText],
    tokenizers: tuple[Tokenizer, Tokenizer],
    split: Split,
    directory: Path,
    *,
    rules: dict[str, Any],
    words: bool = False,
    trusted: bool = False,
    progress: Callable[[int], None] | None = None,
    say: Callable[[str], None] | None = None,
) -> EncodedCorpus:
    """Open the store of these corpora in `directory`, making it first if there is none that fits.

    Of several processes that want the same store one makes it, and the others wait. `rules` are the
    arguments of `PairRules`. `words`: store also the words of each pair, for BPE-dropout.
    `trusted`: another process has just opened it; it is not read once more to look for damage.
    `progress` is called with the number of pairs read so far; `say` is told what takes its time.
    DataError: files missing, not UTF-8, out of step or changed meanwhile; no pair left; disk full.
    """
    wanted = _Wanted(corpora, tokenizers, split, rules, words)
    key = wanted.key()
    index_path = directory / f"{split}-{key[:16]}.json"
    weights = tuple(text.weight for text in corpora for _ in text.shards())
    index = _read_index(index_path, key, words, trusted)
    if index is not None and not left_over(index_path):
        return EncodedCorpus(index_path, index, weights, reused=True)
    say = say or (lambda _: None)
    try:
        directory.mkdir(parents=True, exist_ok=True)
        sweep(index_path)
        name = SPLIT_NAMES[split]
        with maker(index_path, lambda: say(f"another process encodes the {name} text")) as folder:
            index = _read_index(index_path, key, words)  # perhaps one was waited for
            reused = index is not None
            if index is None:
                index = _made(wanted, key, index_path, folder, progress, say)
            shutil.rmtree(folder, ignore_errors=True)
    except OSError as error:
        raise DataError(f"{directory}: cannot write the encoded text there: {error}.") from None
    return EncodedCorpus(index_path, index, weights, reused=reused)


@dataclass(frozen=True, slots=True)
class _Wanted:
    """Everything that the content of a store depends on."""

    corpora: Sequence[ParallelText]
    tokenizers: tuple[Tokenizer, Tokenizer]
    split: Split
    rules: dict[str, Any]
    words: bool

    def key(self) -> str:
        """A hash of all that, the files by path, size and modification time."""
        identity = {
            "format": _FORMAT,
            "split": self.split,
            "corpora": [text.identity() for text in self.corpora],
            "tokenizers": [tokenizer.hash for tokenizer in self.tokenizers],
            "rules": self.rules,
            **({"words": True} if self.words else {}),
        }
        return hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()

    def shards(self) -> list[tuple[ParallelText, dict[str, Any]]]:
        """The shards of all corpora, each with its entry in the index, which is to be filled in."""
        found = []
        for number, text in enumerate(self.corpora):
            entry: dict[str, Any] = {} if text.tag is None else {"tag": text.tag}
            if text.more:
                entry["corpus"] = number
            for shard in text.shards():
                counts = {"lines": 0, "pairs": 0, "sha256": []}
                found.append((shard, {"files": list(shard.files), **entry, **counts}))
        return found


# ---- writing the store ------------------------------------------------------------------------


def _made(
    wanted: _Wanted,
    key: str,
    index_path: Path,
    folder: Path,
    progress: Callable[[int], None] | None,
    say: Callable[[str], None],
) -> dict[str, Any]:
    """Encode into `folder`, move the parts to their places, write the index.

    What a fault of the text has left in the folder is removed; what a kill, a lost encoder or a
    full disk has left stays for the next time.
    """
    index: dict[str, Any] = {"key": key, "split": wanted.split, "rules": wanted.rules}
    names = part_names(wanted.words)
    try:
        index |= _encode(wanted, key, folder, progress, say)
        if not sum(corpus["pairs"] for corpus in index["corpora"]):
            raise DataError(_nothing_left(index))
        if wanted.key() != key:
            raise DataError(f"The {SPLIT_NAMES[wanted.split]} files changed while they were read.")
        prints = fingerprints([folder / name for name in names])
        index["files"] = dict(zip(names, prints, strict=True))
        for name in names:
            os.replace(folder / name, part_path(index_path, name))
        content = {**index, "sum": _index_sum(index)}
        atomic_write_text(index_path, json.dumps(content, indent=1) + "\n")
        sync_directory(index_path.parent)
    except DataError as error:
        if not isinstance(error, EncoderLost | WriteError):
            shutil.rmtree(folder, ignore_errors=True)
        raise
    return index


def _encode(
    wanted: _Wanted,
    key: str,
    folder: Path,
    progress: Callable[[int], None] | None,
    say: Callable[[str], None],
) -> dict[str, Any]:
    """Write the parts of the store into `folder` and return what the index says about them."""
    shards, rules = wanted.shards(), PairRules(**wanted.rules)
    encoder = BlockEncoder(wanted.tokenizers, rules, wanted.words)
    size = sum(os.stat(name).st_size for shard, _ in shards for name in shard.files)
    with (
        encoders(encoder, processes_for(size), folder) as encode,
        store_writer(folder, key, rules, wanted.words) as writer,
    ):
        tally = writer.tally
        if tally.done:
            say(f"going on with the {SPLIT_NAMES[wanted.split]} text after {tally.done:,} pairs")
        entries = [*tally.corpora, *(entry for _, entry in shards[len(tally.corpora) :])]
        owners: deque[int] = deque()  # the shards of the blocks that are being encoded
        begun = max(0, len(tally.corpora) - 1)
        for arrays in encode(_tasks([shard for shard, _ in shards], entries, begun, owners)):
            tally.corpora += entries[len(tally.corpora) : owners.popleft() + 1]
            writer.add(arrays)
            if progress is not None:
                progress(tally.done)
        tally.corpora += entries[len(tally.corpora) :]  # empty ones at the end
    return {
        "corpora": tally.corpora,
        "skipped": tally.skipped,
        "dtypes": dict(zip(SIDES, map(id_type, wanted.tokenizers), strict=True)),
    }


def _tasks(
    shards: Sequence[ParallelText],
    entries: Sequence[dict[str, Any]],
    begun: int,
    owners: deque[int],
) -> Iterator[tuple[TextBlock, str | None]]:
    """The blocks that are not encoded yet; the shard of each goes to `owners`.

    Of shard `begun` as many lines are encoded as its entry says. When a shard was read to its end,
    its entry gets the hashes of its text: of each of two files, unpacked, or of one file of pairs
    that of both sides' hashes. So text is read once.
    """
    left = entries[begun]["lines"]
    for number, shard in enumerate(shards[begun:], begun):
        hashes = [hashlib.sha256() for _ in SIDES]
        for block in text_blocks(shard):
            for text, value in zip(block.texts, hashes, strict=True):
                value.update(text)
            if left:
                left -= len(block.lines)
                continue
            owners.append(number)
            yield block, shard.tag
        if len(shard.files) == 1:
            hashes = [hashlib.sha256(b"".join(value.digest() for value in hashes))]
        entries[number]["sha256"] = [value.hexdigest() for value in hashes]


# ---- reading the store ------------------------------------------------------------------------


def _read_index(path: Path, key: str, words: bool, trusted: bool = False) -> dict[str, Any] | None:
    """The index of a whole store with this key, or None when it has to be made (again)."""
    try:
        index = json.loads(path.read_bytes())
        if index.pop("sum") != _index_sum(index) or index["key"] != key:
            return None
        names = part_names(words)
        paths = [part_path(path, name) for name in names]
        if not trusted and not are_whole(paths, [index["files"][name] for name in names]):
            return None
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return None
    assert isinstance(index, dict)
    return index


def _index_sum(index: dict[str, Any]) -> int:
    """CRC-32 of the index itself: a flipped bit in a count is one, too."""
    return zlib.crc32(json.dumps(index, sort_keys=True).encode())


# ---- messages ---------------------------------------------------------------------------------


def _describe(index: dict[str, Any]) -> str:
    """ "3 blank (lines 3, 5, 9), 1 too long (line 4)" """
    return ", ".join(
        f"{seen['count']} {reason.replace('_', ' ')} ({_where(seen['first'], index['corpora'])})"
        for reason, seen in index["skipped"].items()
    )


def _where(first: list[list[int]], corpora: list[dict[str, Any]]) -> str:
    """ "line 3", or with several corpora "lines 3, 5 of a.en; line 7 of b.en" """
    places = []
    for number, group in itertools.groupby(first, key=lambda place: place[0]):
        lines = [str(line) for _, line in group]
        word = "line" if len(lines) == 1 else "lines"
        place = f"{word} {', '.join(lines)}"
        one = len(corpora) == 1
        places.append(place if one else f"{place} of {corpora[number]['files'][0]}")
    return "; ".join(places)


def _nothing_left(index: dict[str, Any]) -> str:
    files = ", ".join(" and ".join(corpus["files"]) for corpus in index["corpora"])
    name = SPLIT_NAMES[index["split"]]
    if not index["skipped"]:
        return f"No {name} pairs: {files} are empty; give files with text."
    rules = ", ".join(f"{rule} is {value}" for rule, value in index["rules"].items())
    return (
        f"No {name} pair is left of {files}: skipped {_describe(index)}. "
        f"Correct the files, or the rules under data: {rules}."
    )
