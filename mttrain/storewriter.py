"""Writing a store of encoded text, block by block, so that a kill costs seconds and no doubt.

The parts of a store grow in a folder of their own. Every few seconds they are flushed to the disk,
and a journal is replaced that says how long each of them is then, and how far the text was read. A
process that is killed leaves that; the next one cuts the parts back to the journal, reads the text
on from there, and ends with the very files that an undisturbed one would have made.

Memory: a block of pairs for each encoder, the different words where BPE-dropout needs them, and
the hashes of the pairs where repeated ones are dropped.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from mttrain.bpedropout import Ragged, WordCounter
from mttrain.corpus import atomic_write_text
from mttrain.encoding import SIDES, Arrays, EncoderLost
from mttrain.pairrules import DUPLICATE, REASONS, USED, PairRules
from mttrain.storefiles import map_array, part_names

_JOURNAL = "journal.json"
_HASHES = "hashes"  # a part that is no part of the store: of the pairs seen
_SHOWN_LINES = 5  # line numbers kept for each reason to skip
_PIECE = 1 << 20  # hashes taken over together

COMMIT_EVERY = 15.0
"""Seconds of work that a kill may cost."""


@dataclass(slots=True)
class Tally:
    """What was read, kept and skipped, as it goes into the index.

    corpora: one entry for each shard that was begun, of which `lines` were read in whole blocks.
    """

    corpora: list[dict[str, Any]] = field(default_factory=list)
    skipped: dict[str, dict[str, Any]] = field(default_factory=dict)

    @property
    def done(self) -> int:
        """Pairs read."""
        return int(sum(corpus["lines"] for corpus in self.corpora))

    def add(self, codes: NDArray[np.int8], lines: NDArray[np.int64]) -> None:
        """A block [N] of the shard that was begun last: why each pair is skipped, if it is."""
        found, first = np.unique(codes, return_index=True)
        for code in found[np.argsort(first)].tolist():
            if code == USED:
                continue
            seen = self.skipped.setdefault(REASONS[code - 1], {"count": 0, "first": []})
            at = lines[codes == code]
            seen["count"] += len(at)
            wanted = max(0, _SHOWN_LINES - len(seen["first"]))
            seen["first"] += [[len(self.corpora) - 1, line] for line in at[:wanted].tolist()]
        self.corpora[-1]["lines"] += len(codes)
        self.corpora[-1]["pairs"] += int((codes == USED).sum())


class StoreWriter:
    """The growing parts of a store in `folder`, and the journal of what is safe in them."""

    def __init__(
        self, folder: Path, key: str, rules: PairRules, words: bool, parts: dict[str, IO[bytes]]
    ) -> None:
        self.tally = Tally()
        self._folder, self._key, self._parts = folder, key, parts
        self._rules, self._words = rules, words
        self._counters = {side: WordCounter() for side in SIDES} if words else {}
        self._committed = time.monotonic()
        self._inside = False  # a block, of which only some parts may be written
        if not self._go_on():
            self._begin()
        offsets = [name for name in parts if name.endswith("offsets")]
        self._totals = {name: int(map_array(folder / name, "int64")[-1]) for name in offsets}

    def add(self, arrays: Arrays) -> None:
        """The next block of the shard that was begun last."""
        self._inside = True
        if self._rules.drop_duplicates:
            arrays = self._without_repeated(arrays)
        self.tally.add(arrays["codes"], arrays["lines"])
        self._write("lines", arrays["lines"][arrays["codes"] == USED], np.int64)
        for side in SIDES:
            self._write(f"{side}.tokens", arrays[f"{side}.tokens"])
            self._append_offsets(f"{side}.offsets", arrays[f"{side}.lengths"])
            if self._words:
                self._add_words(side, arrays)
        self._inside = False
        if time.monotonic() - self._committed >= COMMIT_EVERY:
            self.commit()

    def commit(self) -> None:
        """From now on a kill costs nothing of what was added until here.

        Does nothing while a block is being written: the parts would not fit together.
        """
        if self._inside:
            return
        for part in self._parts.values():
            part.flush()
            os.fsync(part.fileno())
        content = {
            "key": self._key,
            "sizes": {name: part.tell() for name, part in self._parts.items()},
            **asdict(self.tally),
        }
        atomic_write_text(self._folder / _JOURNAL, json.dumps(content) + "\n")
        self._committed = time.monotonic()

    # ---- a block -----------------------------------------------------------------------------

    def _without_repeated(self, arrays: Arrays) -> Arrays:
        """The arrays without the pairs that came before; these get their code."""
        new = self._rules.new(arrays["hashes"])
        self._write(_HASHES, arrays["hashes"][new])
        if new.all():
            return arrays
        kept, codes = dict(arrays), arrays["codes"].copy()
        codes[np.flatnonzero(codes == USED)[~new]] = DUPLICATE
        kept["codes"] = codes
        for side in SIDES:
            for counts, values in (("lengths", "tokens"), ("word_counts", "words")):
                if f"{side}.{counts}" in arrays:
                    repeats = arrays[f"{side}.{counts}"]
                    kept[f"{side}.{values}"] = arrays[f"{side}.{values}"][np.repeat(new, repeats)]
                    kept[f"{side}.{counts}"] = repeats[new]
        return kept

    def _add_words(self, side: str, arrays: Arrays) -> None:
        starts = np.concatenate(([0], np.cumsum(arrays[f"{side}.type_lengths"])))
        types = Ragged(arrays[f"{side}.types"], starts.astype(np.int64))
        numbers, fresh = self._counters[side].number(types)
        self._write(f"{side}.words", numbers[arrays[f"{side}.words"]], np.uint32)
        self._write(f"{side}.word_counts", arrays[f"{side}.word_counts"], np.int64)
        new = types.take(np.flatnonzero(fresh))
        self._write(f"{side}.types", new.values, np.uint32)
        self._append_offsets(f"{side}.type_offsets", new.lengths)

    def _write(self, name: str, array: NDArray[Any], dtype: type | None = None) -> None:
        self._parts[name].write(array.astype(dtype or array.dtype, copy=False).tobytes())

    def _append_offsets(self, name: str, lengths: NDArray[np.int64]) -> None:
        if len(lengths):
            ends = self._totals[name] + np.cumsum(lengths)
            self._write(name, ends, np.int64)
            self._totals[name] = int(ends[-1])

    # ---- after a kill ------------------------------------------------------------------------

    def _begin(self) -> None:
        for name, part in self._parts.items():
            part.truncate(0)
            if name.endswith("offsets"):
                self._write(name, np.zeros(1, dtype=np.int64))
            part.flush()

    def _go_on(self) -> bool:
        """Take over what an earlier process left; False when that is nothing whole."""
        try:
            journal = json.loads((self._folder / _JOURNAL).read_bytes())
            sizes = {name: int(journal["sizes"][name]) for name in self._parts}
            if journal.pop("key") != self._key:
                return False
            del journal["sizes"]
            tally = Tally(**journal)
        except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
            return False
        if any((self._folder / name).stat().st_size < size for name, size in sizes.items()):
            return False
        for name, part in self._parts.items():
            part.truncate(sizes[name])
            part.seek(sizes[name])
        self.tally = tally
        if _HASHES in self._parts:
            hashes = map_array(self._folder / _HASHES, "uint64")
            for first in range(0, len(hashes), _PIECE):
                self._rules.new(hashes[first : first + _PIECE])
        for side, counter in self._counters.items():
            values = map_array(self._folder / f"{side}.types", "uint32")
            counter.number(
                Ragged(values, map_array(self._folder / f"{side}.type_offsets", "int64"))
            )
        return True


@contextmanager
def store_writer(folder: Path, key: str, rules: PairRules, words: bool) -> Iterator[StoreWriter]:
    """The writer of a store in this folder; at the end all is on the disk.

    When the block is left by an interrupt, or because an encoder is gone, what was added so far is
    kept for the next start.
    """
    names = [*part_names(words), *([_HASHES] if rules.drop_duplicates else [])]
    with ExitStack() as stack:
        parts: dict[str, IO[bytes]] = {}
        for name in names:
            descriptor = os.open(folder / name, os.O_RDWR | os.O_CREAT, 0o666)
            parts[name] = stack.enter_context(os.fdopen(descriptor, "r+b", buffering=1 << 20))
        writer = StoreWriter(folder, key, rules, words, parts)
        try:
            yield writer
        except BaseException as error:
            if isinstance(error, EncoderLost) or not isinstance(error, Exception):
                writer.commit()
            raise
        writer.commit()
