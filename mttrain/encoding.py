"""Blocks of text to blocks of ids, in this process or in several.

A block goes to an encoder as undecoded lines and comes back as flat arrays: nothing crosses a
border between processes pair by pair. An encoder decodes, segments, applies the rules that look at
one pair alone, and drops what they refuse. Which process encodes a block changes nothing, and the
results come back in the order of the blocks.

The processes are `python -m mttrain.encoding`, fed by pipes: they load neither torch nor what the
calling program has loaded, whatever threads and devices it holds. Each is one thread of the
tokenizer's program and 60 to 100 MB. For little text there is none of them: there the threads of
the tokenizer's own library, in this process, are faster than starting up.
"""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from mttrain.bpedropout import block_words
from mttrain.cores import usable_cores
from mttrain.errors import DataError
from mttrain.pairrules import USED, PairRules, as_settings, blank_pairs, pair_hash
from mttrain.textblocks import TextBlock, decoded
from mttrain.tokenizer import EOS_ID, Tokenizer

SIDES = ("source", "target")
MANY = 32 << 20  # bytes of text, packed or not, from which on processes are worth their start
MOST = 12  # processes: with up to 100 MB each and what the caller holds, some 1.5 GB
_AHEAD = 2  # blocks handed out for each encoder, and two more: none of them waits

Arrays = dict[str, NDArray[Any]]
"""What a block of N pairs gives, of which K are used (by the rules for single pairs):

codes [N] int8           why a pair is skipped (`PairRules.codes`)
lines [N] int64          line numbers
hashes [K] uint64        of the texts; only when repeated pairs are dropped
source.tokens, .lengths  the ids of all K texts in a row, each with EOS, and how many each has [K]
source.types, .type_lengths, .words, .word_counts   for BPE-dropout: the different words in a row,
                         the length of each, which one stands at each place, and how many words each
                         text has [K]; without EOS, the tag a word of its own
"""


class EncoderLost(DataError):
    """A process that encodes is gone; what was encoded so far is good."""


@dataclass(frozen=True, slots=True)
class BlockEncoder:
    """What is done with a block: two tokenizers, the rules, and whether words are kept."""

    tokenizers: tuple[Tokenizer, Tokenizer]
    rules: PairRules
    words: bool

    def encode(self, block: TextBlock, tag: str | None) -> Arrays:
        """The arrays of a block whose sources all get this tag. DataError: not UTF-8."""
        texts = decoded(block)
        encoded = [self._ids(place, lines) for place, lines in enumerate(texts)]
        lengths = [_lengths(rows) for rows, _ in encoded]
        codes = self.rules.codes(lengths[0], lengths[1], blank_pairs(*texts), tag is not None)
        kept = np.flatnonzero(codes == USED).tolist()
        arrays: Arrays = {"codes": codes, "lines": block.lines}
        if self.rules.drop_duplicates:
            hashes = [pair_hash(texts[0][at], texts[1][at], tag) for at in kept]
            arrays["hashes"] = np.array(hashes, dtype=np.uint64)
        for name, tokenizer, (rows, places) in zip(SIDES, self.tokenizers, encoded, strict=True):
            rows, places = [rows[at] for at in kept], [places[at] for at in kept if places]
            if tag is not None and name == "source":  # before each text, a word of its own
                rows = [[tokenizer.tags[tag], *row] for row in rows]
                places = [[-1, *place] for place in places]
            side = _flat(rows, id_type(tokenizer))
            if self.words:
                side |= block_words(rows, places)
            arrays |= {f"{name}.{part}": array for part, array in side.items()}
        return arrays

    def _ids(self, place: int, lines: list[str]) -> tuple[list[list[int]], list[list[int]]]:
        """Ids of each text, and where words are kept to which word each belongs."""
        if self.words:
            return self.tokenizers[place].encode_words(lines)
        return self.tokenizers[place].encode_batch(lines), []


def id_type(tokenizer: Tokenizer) -> str:
    """The type of stored ids."""
    return "uint16" if tokenizer.size <= 1 << 16 else "uint32"


def _lengths(rows: Sequence[Sequence[int]]) -> NDArray[np.int64]:
    """Of each row with its EOS."""
    return np.fromiter(map(len, rows), dtype=np.int64, count=len(rows)) + 1


def _flat(rows: Sequence[Sequence[int]], dtype: str) -> Arrays:
    """The rows behind one another, each with EOS."""
    lengths = _lengths(rows)
    ends = np.cumsum(lengths)
    tokens = np.full(int(lengths.sum()), EOS_ID, dtype=dtype)
    inside = np.ones(len(tokens), dtype=np.bool_)
    inside[ends - 1] = False  # where each row's EOS stays
    count = len(tokens) - len(rows)
    tokens[inside] = np.fromiter(itertools.chain.from_iterable(rows), dtype=dtype, count=count)
    return {"tokens": tokens, "lengths": lengths}


# ---- many encoders ----------------------------------------------------------------------------

Task = tuple[TextBlock, str | None]


def processes_for(size: int) -> int:
    """How many processes encode `size` bytes of text files; 0: this one does."""
    cores = usable_cores()
    return min(cores, MOST) if size >= MANY and cores > 1 else 0


@contextmanager
def encoders(
    encoder: BlockEncoder, processes: int, folder: Path
) -> Iterator[Callable[[Iterable[Task]], Iterator[Arrays]]]:
    """A function from blocks with their tags to their arrays, in order.

    processes: how many work beside this one; 0: a thread of this one does. They read the tokenizers
    from `folder`. An error in the text is raised in its place, behind the blocks before it;
    EncoderLost when a process was killed.
    """
    if not processes:
        with ThreadPoolExecutor(1) as pool:
            yield lambda tasks: _in_order(pool, encoder.encode, tasks, 1)
        return
    names = [folder / f"tokenizer.{side}.json" for side in SIDES]
    for name, tokenizer in zip(names, encoder.tokenizers, strict=True):
        tokenizer.save(name)
    settings = json.dumps({"rules": as_settings(encoder.rules), "words": encoder.words})
    command = [sys.executable, "-m", "mttrain.encoding", *map(str, names), settings]
    with ThreadPoolExecutor(processes) as pool, _started(command, processes) as idle:

        def ask(block: TextBlock, tag: str | None) -> Arrays:
            process = idle.get()
            try:
                return _asked(process, block, tag)
            finally:
                idle.put(process)

        yield lambda tasks: _in_order(pool, ask, tasks, processes)


def _in_order(
    pool: ThreadPoolExecutor,
    encode: Callable[[TextBlock, str | None], Arrays],
    tasks: Iterable[Task],
    encoders: int,
) -> Iterator[Arrays]:
    pending: deque[Future[Arrays]] = deque()
    iterator, fault = iter(tasks), None
    try:
        while True:
            try:
                task = next(iterator, None)
            except DataError as error:  # told when the blocks before it are through
                task, fault = None, error
            if task is None:
                break
            pending.append(pool.submit(encode, *task))
            if len(pending) > _AHEAD * encoders + 1:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()
        if fault is not None:
            raise fault
    finally:
        for future in pending:
            future.cancel()


@contextmanager
def _started(command: list[str], count: int) -> Iterator[SimpleQueue[subprocess.Popen[bytes]]]:
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path),
        "TOKENIZERS_PARALLELISM": "false",
        "OMP_NUM_THREADS": "1",
    }
    idle: SimpleQueue[subprocess.Popen[bytes]] = SimpleQueue()
    processes: list[subprocess.Popen[bytes]] = []
    try:
        for _ in range(count):
            process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment
            )
            processes.append(process)
            idle.put(process)
        yield idle
    finally:
        for process in processes:
            process.kill()  # it has nothing to put in order
        for process in processes:
            process.wait()
            for pipe in (process.stdin, process.stdout):
                with suppress(OSError):
                    pipe.close()  # type: ignore[union-attr]


def _asked(process: subprocess.Popen[bytes], block: TextBlock, tag: str | None) -> Arrays:
    """Let a process encode a block."""
    assert process.stdin is not None and process.stdout is not None
    head = {"files": block.files, "offsets": block.offsets, "tag": tag}
    try:
        _send(process.stdin, head, {"lines": block.lines}, block.texts)
        message = _receive(process.stdout)
    except OSError:
        message = None
    if message is None:
        raise EncoderLost(
            f"a process that encodes text has ended (status {process.wait()}), perhaps for lack of "
            "memory; the same command goes on where it was."
        )
    head, arrays, _ = message
    if "error" in head:
        raise DataError(head["error"])
    return arrays


# ---- the process ------------------------------------------------------------------------------


def serve(arguments: Sequence[str], source: IO[bytes], sink: IO[bytes]) -> None:
    """Encode the blocks that come from `source` until it ends."""
    *names, text = arguments
    settings = json.loads(text)
    one, two = (Tokenizer.load(name) for name in names)
    encoder = BlockEncoder((one, two), PairRules(**settings["rules"]), settings["words"])
    while (message := _receive(source)) is not None:
        head, arrays, texts = message
        block = TextBlock(tuple(head["files"]), arrays["lines"], texts, tuple(head["offsets"]))
        try:
            _send(sink, {}, encoder.encode(block, head["tag"]))
        except DataError as error:
            _send(sink, {"error": str(error)}, {})


def _send(
    pipe: IO[bytes], head: dict[str, Any], arrays: Arrays, texts: tuple[bytes, bytes] = (b"", b"")
) -> None:
    """A line of JSON that tells what follows, then the bytes of all arrays and texts."""
    shapes = [[name, str(array.dtype), len(array)] for name, array in arrays.items()]
    full = {**head, "arrays": shapes, "texts": [len(text) for text in texts]}
    pipe.write(json.dumps(full).encode() + b"\n")
    for array in arrays.values():
        pipe.write(array.tobytes())
    for text in texts:
        pipe.write(text)
    pipe.flush()


def _receive(pipe: IO[bytes]) -> tuple[dict[str, Any], Arrays, tuple[bytes, bytes]] | None:
    """The next message, or None when there is no whole one any more."""
    line = pipe.readline()
    if not line.endswith(b"\n"):
        return None
    head = json.loads(line)
    arrays: Arrays = {}
    for name, dtype, length in head["arrays"]:
        data = pipe.read(length * np.dtype(dtype).itemsize)
        if len(data) < length * np.dtype(dtype).itemsize:
            return None
        arrays[name] = np.frombuffer(data, dtype=dtype)
    one, two = (pipe.read(size) for size in head["texts"])
    if [len(one), len(two)] != head["texts"]:
        return None
    return head, arrays, (one, two)


def _main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the caller's affair
    sink = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # whatever prints must not get between the arrays
    with suppress(BrokenPipeError):
        serve(sys.argv[1:], sys.stdin.buffer, sink)


if __name__ == "__main__":
    _main()
