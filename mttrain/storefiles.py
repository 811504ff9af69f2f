"""The files of a store of encoded text: their names, one maker at a time, and whether they are
whole.

    train-0123456789abcdef.json       the index, written last: without it there is no store
    train-0123456789abcdef.*          flat files of numbers, memory-mapped
    train-0123456789abcdef.lock       held by the process that makes the store
    train-0123456789abcdef.partial/   what that process has made so far

A start reads all flat files once and compares the CRC-32 of each piece of 16 MB with the index, in
several threads. That costs less than reading them from a disk, finds every flipped bit, and leaves
the files in the memory of the system, from where training takes them in random order. (CRC-32 sees
every error of up to 32 bits in a row and misses others in one case of 4 billion: it is against
damage, not against an enemy, who could write the index as well.)
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import shutil
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

PARTS = ("source.tokens", "source.offsets", "target.tokens", "target.offsets", "lines")
WORD_PARTS = ("words", "word_counts", "types", "type_offsets")  # of each side
PARTIAL, LOCK = ".partial", ".lock"

_PIECE = 16 << 20  # bytes under one checksum
_THREADS = 4  # they wait for the disk more than for the processor
_ABANDONED = 24 * 3600  # seconds after which what a killed encoder has left is removed
_LOOK = 0.2  # seconds between two looks at a lock
_UNFINISHED = re.compile(r"(train|valid|test)-[0-9a-f]{16}\.partial(-.*)?", re.DOTALL)
# What a file system says that knows no locks.
NO_LOCKS = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS)


def part_names(words: bool) -> list[str]:
    """Names of the files of a store, without or with the words of both sides."""
    sides = ("source", "target") if words else ()
    return [*PARTS, *(f"{side}.{part}" for side in sides for part in WORD_PARTS)]


def part_path(index_path: Path, name: str) -> Path:
    """The path of a part of the store with this index."""
    return index_path.with_name(f"{index_path.stem}.{name}")


def map_array(path: Path, dtype: str) -> NDArray[Any]:
    """The file as a read-only array; slices of the plain type cost less than those of a memmap."""
    if not path.stat().st_size:  # which cannot be mapped
        return np.zeros(0, dtype=dtype)
    return np.asarray(np.memmap(path, dtype=dtype, mode="r"))


# ---- damage -----------------------------------------------------------------------------------


def fingerprints(paths: Sequence[Path]) -> list[list[int]]:
    """Of each file its size and the CRC-32 of each of its pieces. OSError: it cannot be read."""
    sizes = [path.stat().st_size for path in paths]
    pieces = [
        (path, at) for path, size in zip(paths, sizes, strict=True) for at in range(0, size, _PIECE)
    ]
    with ThreadPoolExecutor(_THREADS) as pool:
        sums = pool.map(_checksum, *zip(*pieces, strict=True)) if pieces else iter(())
        return [[size, *(next(sums) for _ in range(0, size, _PIECE))] for size in sizes]


def are_whole(paths: Sequence[Path], wanted: Sequence[list[int]]) -> bool:
    """Whether the files have these fingerprints; sizes are looked at first."""
    if [path.stat().st_size for path in paths] != [found[0] for found in wanted]:
        return False
    return fingerprints(paths) == list(wanted)


def _checksum(path: Path, offset: int) -> int:
    with path.open("rb", buffering=0) as file:
        file.seek(offset)
        left, value = _PIECE, 0
        while left and (data := file.read(min(left, 1 << 20))):
            value = zlib.crc32(data, value)
            left -= len(data)
    return value


# ---- one maker at a time ----------------------------------------------------------------------


@contextmanager
def maker(index_path: Path, waits: Callable[[], None] | None = None) -> Iterator[Path]:
    """Be the only process that makes this store; gives the folder for what is not complete.

    Waits while another process makes it; `waits` is called once before that. A process that dies
    lets go, and its folder is the next one's. On a file system without locks each process has a
    folder of its own, and the last one to finish replaces the same files by equal ones.
    """
    path = index_path.with_suffix(LOCK)
    lock = _locked(path, waits)
    folder = index_path.with_suffix(PARTIAL)
    if lock is None:
        folder = folder.with_name(f"{folder.name}-{os.uname().nodename}-{os.getpid()}")
    try:
        folder.mkdir(exist_ok=True)
        yield folder
    finally:
        if lock is not None:
            with suppress(OSError):
                path.unlink()
            lock.close()


def _locked(path: Path, waits: Callable[[], None] | None) -> IO[bytes] | None:
    """The open lock file, locked; None where the file system knows no locks."""
    while True:
        lock = path.open("ab")
        try:
            while not _lock(lock):
                if waits is not None:
                    waits()
                    waits = None
                time.sleep(_LOOK)
            # Whoever had it before has removed the file: a lock on that keeps nobody out.
            if _same_file(lock, path):
                return lock
        except OSError as error:
            lock.close()
            if error.errno not in NO_LOCKS:
                raise
            path.unlink(missing_ok=True)
            return None
        except BaseException:
            lock.close()
            raise
        lock.close()


def _lock(lock: IO[bytes]) -> bool:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _same_file(lock: IO[bytes], path: Path) -> bool:
    try:
        there = path.stat()
    except FileNotFoundError:
        return False
    return os.path.samestat(os.fstat(lock.fileno()), there)


def left_over(index_path: Path) -> bool:
    """Whether the maker of a store was killed at its very end, before it could put away its things;
    or is just doing so. In a directory that is not ours to write in they stay."""
    things = (index_path.with_suffix(PARTIAL), index_path.with_suffix(LOCK))
    return any(thing.exists() for thing in things) and os.access(index_path.parent, os.W_OK)


def sweep(index_path: Path) -> None:
    """Remove what encoders of other stores beside this one have left that were killed more than a
    day ago; with what this one's has left, its next encoder goes on.

    One that is at work replaces the journal in its folder all the time.
    """
    for old in filter(lambda path: _UNFINISHED.fullmatch(path.name), index_path.parent.iterdir()):
        with suppress(OSError):
            own = old.stem == index_path.stem
            if not own and time.time() - old.stat().st_mtime > _ABANDONED:
                shutil.rmtree(old, ignore_errors=True)
