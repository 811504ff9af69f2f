"""Encoded parallel text on disk: subwords in flat files that are memory-mapped.

`open_store` reads the text files once, skips the pairs that a rule refuses (counting them, with
line numbers), and writes the subwords of the rest into one flat file per side, 2 bytes for each (4
when the vocabulary has more than 65,536 entries), and where each pair begins. The files carry a key
made of the path, size and modification time of the text files, of the tokenizers and of the rules:
while that is unchanged the next start only maps them. It reads them once for their SHA-256, about a
second per 500 MB, so that a damaged store is made again and never trained on. Writing takes memory
for one block of pairs, whatever the size of the corpus, and goes at the speed of the tokenizer.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, Literal

import numpy as np
from numpy.typing import NDArray

from mttrain.bpedropout import WordCounter
from mttrain.corpus import (
    Pair,
    atomic_write_text,
    file_sha256,
    in_blocks,
    sync_directory,
)
from mttrain.errors import DataError
from mttrain.pairs import ParallelText
from mttrain.rundir import remove_leftover
from mttrain.tags import tag_token
from mttrain.tokenizer import EOS_ID, Tokenizer

Split = Literal["train", "valid", "test"]
Refuse = Callable[[Pair, int, int, str | None], str | None]
"""Why a pair with these subword counts (EOS included) and this tag, which is not counted, is
skipped, or None when it is kept."""

SPLIT_NAMES = {"train": "training", "valid": "validation", "test": "test"}

_FORMAT = 1  # a store of another format is made anew
_BLOCK = 4096  # pairs encoded at a time
_SHOWN_LINES = 5  # line numbers kept for each reason to skip
_ABANDONED = 24 * 3600  # seconds after which the folder of a killed encoder is removed
_PARTS = ("source.tokens", "source.offsets", "target.tokens", "target.offsets", "lines")
_WORD_PARTS = ("words", "word_counts", "types", "type_offsets")  # of each side


@dataclass(frozen=True, slots=True)
class EncodedCorpus:
    """A store on disk: `index_path` is its JSON, `index` the content of that, checked.

    `weights` has one number per corpus: how many times an epoch holds its pairs.
    """

    index_path: Path
    index: dict[str, Any]
    weights: tuple[float, ...]
    reused: bool

    def __len__(self) -> int:
        return int(sum(corpus["pairs"] for corpus in self.index["corpora"]))

    def part(self, name: str) -> Path:
        """Path of one of the files beside the index."""
        return _part_path(self.index_path, name)

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

    @property
    def mixed(self) -> bool:
        """Whether an epoch is anything but each pair once."""
        return any(weight != 1.0 for weight in self.weights)

    def mixture(self) -> str:
        """How often an epoch holds each corpus, for the console; empty where that is once."""
        if not self.mixed:
            return ""
        parts = []
        for corpus, times in zip(self.index["corpora"], self.weights, strict=True):
            # The directions of one file of pairs differ by their tags alone.
            name = corpus["files"][0] + (f" {tag_token(corpus['tag'])}" if "tag" in corpus else "")
            parts.append(f"{name} {times:.4g} times ({round(corpus['pairs'] * times):,} pairs)")
        return f"an epoch holds {', '.join(parts)}"

    def text(self) -> str:
        """The same in one line for the console."""
        lines = sum(corpus["lines"] for corpus in self.index["corpora"])
        line = f"{SPLIT_NAMES[self.index['split']]}: {len(self)} of {lines} pairs"
        return f"{line}; skipped {_describe(self.index)}" if self.skipped else line


def open_store(
    corpora: Sequence[ParallelText],
    tokenizers: tuple[Tokenizer, Tokenizer],
    split: Split,
    directory: Path,
    *,
    rules: dict[str, object],
    refuse: Refuse,
    words: bool = False,
    progress: Callable[[int], None] | None = None,
) -> EncodedCorpus:
    """Open the store of these corpora in `directory`, making it first if there is none that fits.

    `rules` describes `refuse` in plain values: it belongs to the key. `words`: store also the words
    of each pair, for BPE-dropout. `progress` is called with the number of pairs read so far.
    DataError: files missing, not UTF-8, out of step or changed meanwhile; no pair left; disk full.
    """
    identity = _identity(corpora, tokenizers, split, rules, words)
    key = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()
    index_path = directory / f"{split}-{key[:16]}.json"
    weights = tuple(text.weight for text in corpora)
    index = _read_index(index_path, key, words)
    if index is not None:
        return EncodedCorpus(index_path, index, weights, reused=True)
    with _write_aside(directory, index_path) as folder:
        index = {"format": _FORMAT, "key": key, "split": split, "rules": rules}
        index |= _encode(folder, corpora, tokenizers, refuse, words, progress)
        if not sum(corpus["pairs"] for corpus in index["corpora"]):
            raise DataError(_nothing_left(index))
        for corpus, text in zip(index["corpora"], corpora, strict=True):
            corpus["sha256"] = [file_sha256(path) for path in text.files]
        if _identity(corpora, tokenizers, split, rules, words) != identity:
            raise DataError(f"The {SPLIT_NAMES[split]} files changed while they were read.")
        index["files"] = {name: _fingerprint(folder / name) for name in part_names(words)}
        for name in part_names(words):
            os.replace(folder / name, _part_path(index_path, name))
        atomic_write_text(index_path, json.dumps(index, indent=1) + "\n")
    return EncodedCorpus(index_path, index, weights, reused=False)


def _identity(
    corpora: Sequence[ParallelText],
    tokenizers: tuple[Tokenizer, Tokenizer],
    split: Split,
    rules: dict[str, object],
    words: bool,
) -> dict[str, object]:
    """Everything the content of a store depends on."""
    return {
        "format": _FORMAT,
        "split": split,
        "corpora": [text.identity() for text in corpora],
        "tokenizers": [tokenizer.hash for tokenizer in tokenizers],
        "rules": rules,
        **({"words": True} if words else {}),
    }


# ---- writing the store ------------------------------------------------------------------------


class _Side:
    """The growing files of one side: tokens, where each pair begins, and maybe its words."""

    def __init__(self, parts: dict[str, IO[bytes]], side: str, dtype: str, words: bool) -> None:
        self._parts = {name.removeprefix(f"{side}."): file for name, file in parts.items()}
        self._dtype = dtype
        self._total = 0
        self._words = WordCounter() if words else None
        self._parts["offsets"].write(np.zeros(1, dtype=np.int64).tobytes())

    def append(self, rows: Sequence[Sequence[int]], words: Sequence[Sequence[int]]) -> None:
        lengths = np.fromiter(map(len, rows), dtype=np.int64, count=len(rows)) + 1
        ends = self._total + np.cumsum(lengths)
        flat = np.full(int(lengths.sum()), EOS_ID, dtype=self._dtype)
        inside = np.ones(len(flat), dtype=np.bool_)
        inside[ends - self._total - 1] = False  # where each row's EOS stays
        flat[inside] = np.fromiter(itertools.chain.from_iterable(rows), dtype=self._dtype)
        self._parts["tokens"].write(flat.tobytes())
        self._parts["offsets"].write(ends.tobytes())
        self._total = int(ends[-1])
        if self._words is not None:
            types, counts = self._words.add(rows, words)
            self._parts["words"].write(types.astype(np.uint32).tobytes())
            self._parts["word_counts"].write(counts.astype(np.int64).tobytes())

    def close(self) -> None:
        """Write what is known only at the end: the different words."""
        if self._words is not None:
            types = self._words.types()
            self._parts["types"].write(types.values.astype(np.uint32).tobytes())
            self._parts["type_offsets"].write(types.starts.tobytes())


@dataclass(slots=True)
class _Tally:
    """What was read, kept and skipped, as it goes into the index."""

    corpora: list[dict[str, Any]] = field(default_factory=list)
    skipped: dict[str, dict[str, Any]] = field(default_factory=dict)

    def begin(self, text: ParallelText) -> None:
        tag = {} if text.tag is None else {"tag": text.tag}
        self.corpora.append({"files": list(text.files), **tag, "lines": 0, "pairs": 0})

    def skip(self, reason: str, line: int) -> None:
        seen = self.skipped.setdefault(reason, {"count": 0, "first": []})
        seen["count"] += 1
        if len(seen["first"]) < _SHOWN_LINES:
            seen["first"].append([len(self.corpora) - 1, line])


def _encode(
    folder: Path,
    corpora: Sequence[ParallelText],
    tokenizers: tuple[Tokenizer, Tokenizer],
    refuse: Refuse,
    words: bool,
    progress: Callable[[int], None] | None,
) -> dict[str, Any]:
    """Write the parts of the store into `folder` and return what the index says about them."""
    dtypes = ["uint16" if tokenizer.size <= 1 << 16 else "uint32" for tokenizer in tokenizers]
    tally, done = _Tally(), 0
    with _open_parts(folder, part_names(words)) as parts:
        sides = [
            _Side(parts, side, dtype, words)
            for side, dtype in zip(("source", "target"), dtypes, strict=True)
        ]
        for text in corpora:
            tally.begin(text)
            for block in in_blocks(text.pairs(), _BLOCK):
                encoded = [
                    _encoded(tokenizer, [getattr(pair, name) for pair in block], words)
                    for tokenizer, name in zip(tokenizers, ("source", "target"), strict=True)
                ]
                kept = _kept(block, encoded[0][0], encoded[1][0], refuse, tally, text.tag)
                if kept:
                    numbers = np.array([block[i].line for i in kept], dtype=np.int64)
                    parts["lines"].write(numbers.tobytes())
                    if text.tag is not None:
                        encoded[0] = _tagged(tokenizers[0].tags[text.tag], *encoded[0])
                    for side, (ids, places) in zip(sides, encoded, strict=True):
                        side.append([ids[i] for i in kept], [places[i] for i in kept])
                done += len(block)
                if progress is not None:
                    progress(done)
        for side in sides:
            side.close()
    return {
        "corpora": tally.corpora,
        "skipped": tally.skipped,
        "dtypes": {"source": dtypes[0], "target": dtypes[1]},
        "vocab": [tokenizer.size for tokenizer in tokenizers],
    }


def _encoded(
    tokenizer: Tokenizer, texts: Sequence[str], words: bool
) -> tuple[list[list[int]], list[list[int]]]:
    """Ids of each text, and where words are wanted to which word each belongs."""
    if words:
        return tokenizer.encode_words(texts)
    return tokenizer.encode_batch(texts), [[] for _ in texts]


def _tagged(
    tag: int, rows: Sequence[list[int]], places: Sequence[list[int]]
) -> tuple[list[list[int]], list[list[int]]]:
    """The same with the tag before each text, as a word of its own, which is number -1."""
    words = [[-1, *place] if place else place for place in places]
    return [[tag, *row] for row in rows], words


def _kept(
    block: Sequence[Pair],
    sources: Sequence[Sequence[int]],
    targets: Sequence[Sequence[int]],
    refuse: Refuse,
    tally: _Tally,
    tag: str | None,
) -> list[int]:
    """Places in the block of the pairs that are not refused; the ids are without tag and EOS."""
    kept = []
    for place, (pair, source, target) in enumerate(zip(block, sources, targets, strict=True)):
        reason = refuse(pair, len(source) + 1, len(target) + 1, tag)
        if reason is None:
            kept.append(place)
        else:
            tally.skip(reason, pair.line)
    tally.corpora[-1]["lines"] += len(block)
    tally.corpora[-1]["pairs"] += len(kept)
    return kept


@contextmanager
def _open_parts(folder: Path, names: Sequence[str]) -> Iterator[dict[str, IO[bytes]]]:
    """The parts of a store by name, open for writing; flushed to the disk at the end."""
    with ExitStack() as stack:
        parts: dict[str, IO[bytes]] = {}
        for name in names:
            parts[name] = stack.enter_context((folder / name).open("wb"))
        yield parts
        for part in parts.values():
            part.flush()
            os.fsync(part.fileno())


@contextmanager
def _write_aside(directory: Path, index_path: Path) -> Iterator[Path]:
    """A temporary folder in `directory`, gone afterwards; the system's refusals as one sentence."""
    folder = None
    try:
        directory.mkdir(parents=True, exist_ok=True)
        for old in directory.glob(".tmp-*"):  # left by a process that was killed
            if time.time() - old.stat().st_mtime > _ABANDONED:
                remove_leftover(old)
        folder = Path(tempfile.mkdtemp(prefix=f".tmp-{index_path.stem}-", dir=directory))
        yield folder
        sync_directory(directory)
    except OSError as error:
        raise DataError(f"{directory}: cannot write the encoded text there: {error}.") from None
    finally:
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)


# ---- reading the store ------------------------------------------------------------------------


def part_names(words: bool) -> list[str]:
    """Names of the files of a store, without or with the words of both sides."""
    sides = ("source", "target") if words else ()
    return [*_PARTS, *(f"{side}.{part}" for side in sides for part in _WORD_PARTS)]


def _part_path(index_path: Path, name: str) -> Path:
    return index_path.with_name(f"{index_path.stem}.{name}")


def _fingerprint(path: Path) -> list[int | str]:
    return [path.stat().st_size, file_sha256(path)]


def _read_index(index_path: Path, key: str, words: bool) -> dict[str, Any] | None:
    """The index of a complete store with this key, or None when it has to be made (again)."""
    try:
        index = json.loads(index_path.read_bytes())
        if index["format"] != _FORMAT or index["key"] != key:
            return None
        for name in part_names(words):
            if _fingerprint(_part_path(index_path, name)) != index["files"][name]:
                return None
    except (OSError, DataError, ValueError, LookupError, TypeError, RecursionError):
        return None
    assert isinstance(index, dict)
    return index


def map_array(path: Path, dtype: str) -> NDArray[Any]:
    """The file as a read-only array; slices of the plain type cost less than those of a memmap."""
    return np.asarray(np.memmap(path, dtype=dtype, mode="r"))


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
    return (
        f"No {name} pair is left of {files}: skipped {_describe(index)}. "
        f"Correct the files, or the rules under data: {_rules_text(index['rules'])}."
    )


def _rules_text(rules: dict[str, object]) -> str:
    return ", ".join(f"{name} is {value}" for name, value in rules.items())
