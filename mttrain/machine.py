"""The machine: threads of the CPU, what the C library does with freed memory, no memory left.

torch starts one thread for each physical core that it sees. In a container it sees those of the
host and not the share that the container may use, and several threads a core slow each other five-
to tenfold; so the share counts here.

A training step allocates some hundred megabytes and frees them. The C library hands such memory
back to the system, which clears and maps it again, page by page, in the next step; told to keep it,
it does that once. Price: the process keeps the largest amount that a step has needed.
"""

from __future__ import annotations

import ctypes
import math
import os
import platform
import resource
import sys
from functools import cache

import torch

from mttrain.cores import cpu_quota, within_quota

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # names of mallopt(3)
_LARGEST_ON_HEAP = 32 << 20  # bytes; the C library accepts no more


def prepare_cpu(threads: int | None, processes: int = 1) -> str:
    """Set threads and memory; returns what was set and why, as a part of a sentence.

    threads: what the user asked for, None = choose; processes: how many share this machine.
    """
    count, reason = _threads(threads, processes)
    if count != torch.get_num_threads():
        torch.set_num_threads(count)
    kept = "; freed memory is kept for the next step" if _keep_memory() else ""
    return f"{count} CPU thread{'s' if count > 1 else ''} ({reason}){kept}"


def _threads(wanted: int | None, processes: int) -> tuple[int, str]:
    if wanted is not None:
        return wanted, "as asked for"
    seen = torch.get_num_threads()
    if os.environ.get("OMP_NUM_THREADS"):
        return seen, "OMP_NUM_THREADS"
    count, reason = within_quota(seen), "one per core"
    if count < seen:
        reason = f"this container may use {cpu_quota():g} of {seen} cores"
    if processes > 1:
        count, reason = max(1, count // processes), f"{reason}, shared by {processes} processes"
    return count, reason


@cache
def _keep_memory() -> bool:
    """Keep freed memory, where the C library is glibc and the user has not tuned it himself."""
    if platform.libc_ver()[0] != "glibc" or "GLIBC_TUNABLES" in os.environ:
        return False
    mallopt = ctypes.CDLL(None).mallopt
    largest = 2**31 - 1
    return bool(mallopt(_MMAP_THRESHOLD, _LARGEST_ON_HEAP) and mallopt(_TRIM_THRESHOLD, largest))


def peak_memory(device: torch.device) -> int:
    """Megabytes (2^20): the most that tensors took on a GPU since the last call, or that this
    process ever held on another device."""
    if device.type == "cuda":
        peak = torch.cuda.max_memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        return int(peak) >> 20
    unit = 1 if sys.platform == "darwin" else 1024  # of ru_maxrss, in bytes
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit >> 20


def free_memory(device: torch.device) -> float:
    """Bytes of a GPU that nobody has taken; other devices have no end."""
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else math.inf


def out_of_memory(error: Exception) -> bool:
    """Whether an allocator gave up; that of the CPU (c10, alloc_cpu) raises a RuntimeError."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    text = str(error)
    return any(sign in text for sign in ("not enough memory", "can't allocate memory"))
