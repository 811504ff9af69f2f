"""Processes and devices: torchrun's environment, the process group, reductions, autocast.

One process is the normal case and costs nothing: every reduction returns its input. Under torchrun
the group is gloo on CPU and NCCL on CUDA. Texts travel as JSON bytes in tensors: the object
collectives of torch.distributed would pickle.
"""

from __future__ import annotations

import gc
import json
import os
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from mttrain.errors import ConfigError, MttrainError
from mttrain.linear import bfloat16_is_fast, bfloat16_products


@dataclass(frozen=True)
class World:
    """This process's place: rank of size, and the device it computes on."""

    rank: int
    size: int
    device: torch.device

    @property
    def is_main(self) -> bool:
        """True in the one process that writes files."""
        return self.rank == 0

    def sum(self, values: Sequence[float]) -> list[float]:
        """Element-wise sums over all ranks, in float64."""
        if self.size == 1:
            return list(values)
        # mps and some NCCL builds lack float64; exactness matters more than the device here.
        device = self.device if self.device.type == "cuda" else torch.device("cpu")
        total = torch.tensor(list(values), dtype=torch.float64, device=device)
        dist.all_reduce(total)
        return [float(v) for v in total.tolist()]

    def any(self, flag: bool) -> bool:
        """True on every rank when it is true on one."""
        return self.sum([float(flag)])[0] > 0

    def barrier(self) -> None:
        """Wait until every rank is here."""
        if self.size > 1:
            self.sum([0.0])

    def gather_texts(self, texts: Sequence[str]) -> list[list[str]]:
        """The lists of all ranks, in rank order, on every rank."""
        if self.size == 1:
            return [list(texts)]
        device = self.device if self.device.type == "cuda" else torch.device("cpu")
        data = json.dumps(list(texts)).encode()
        sizes = torch.zeros(self.size, dtype=torch.int64, device=device)
        sizes[self.rank] = len(data)
        dist.all_reduce(sizes)
        longest = int(sizes.max())
        mine = torch.zeros(longest, dtype=torch.uint8, device=device)
        mine[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8).to(device)
        parts = [torch.empty_like(mine) for _ in range(self.size)]
        dist.all_gather(parts, mine)
        return [
            json.loads(bytes(part[:size].cpu().numpy()))
            for part, size in zip(parts, sizes.tolist(), strict=True)
        ]


def choose_device(name: str, local_rank: int = 0) -> torch.device:
    """Device of a configuration's name: auto = CUDA when there is one, else CPU.

    Raises ConfigError when the device named is not on this machine.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda":
        name = f"cuda:{local_rank}"
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigError(f"device {name!r} is unknown; use auto, cpu, cuda or mps") from error
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ConfigError(f"device {name!r} is not on this machine; use auto or cpu")
    if device.type == "mps" and not torch.backends.mps.is_available():
        raise ConfigError("device 'mps' is not on this machine; use auto or cpu")
    return device


def init_world(device: str) -> World:
    """Join torchrun's process group when there is one; else a world of one process.

    Raises ConfigError for a device this machine lacks.
    """
    size = int(os.environ.get("WORLD_SIZE", "1"))
    rank = int(os.environ.get("RANK", "0"))
    chosen = choose_device(device, int(os.environ.get("LOCAL_RANK", "0")))
    if chosen.type == "cuda":
        torch.cuda.set_device(chosen)
    if size > 1 and not dist.is_initialized():
        # Rank 0 encodes the corpus while the others wait: the usual ten minutes are too few.
        backend = "nccl" if chosen.type == "cuda" else "gloo"
        dist.init_process_group(backend, timeout=timedelta(hours=12))
    return World(rank, size, chosen)


def close_world(world: World) -> None:
    """Leave the process group; whoever used it must be gone, but for cycles of references.

    What still refers to the group keeps its threads, and one that works on when the interpreter is
    gone aborts the process.
    """
    if world.size > 1 and dist.is_initialized():
        gc.collect()
        dist.destroy_process_group()


@contextmanager
def one_voice(world: World) -> Iterator[None]:
    """Leave the explanation to the process that failed: the others only find it gone."""
    try:
        yield
    except RuntimeError as error:
        lost = isinstance(error, dist.DistBackendError) or "gloo" in str(error)
        if world.size == 1 or not lost:
            raise
        raise MttrainError(
            f"rank {world.rank}: another process of this job has ended; its message says why."
        ) from error


def compute_type(precision: str, device: torch.device) -> torch.dtype:
    """Type of the matrix products: auto = bfloat16 on a GPU that has it, float32 elsewhere.

    int8 is for decoding on a CPU: ConfigError elsewhere.
    """
    if precision == "auto":
        bf16 = device.type == "cuda" and torch.cuda.is_bf16_supported()
        return torch.bfloat16 if bf16 else torch.float32
    if precision == "int8" and device.type != "cpu":
        raise ConfigError(f"precision int8 runs on a CPU, not on {device.type}; use auto or bf16")
    types = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
    return torch.int8 if precision == "int8" else types[precision]


def autocast(device: torch.device, dtype: torch.dtype) -> AbstractContextManager[object]:
    """Run the matrix products of the block in `dtype`; float32 and int8 need no help."""
    if dtype in (torch.float32, torch.int8):
        return nullcontext()
    return torch.autocast(device.type, dtype=dtype)


def training_type(precision: str, device: torch.device) -> torch.dtype:
    """`compute_type` for training: float32 on a CPU that bfloat16 would slow down."""
    dtype = compute_type(precision, device)
    slow = device.type == "cpu" and dtype == torch.bfloat16 and not bfloat16_is_fast()
    return torch.float32 if slow else dtype


def training_precision(device: torch.device, dtype: torch.dtype) -> AbstractContextManager[object]:
    """`autocast` for training: on a CPU bfloat16 is left to the linear layers."""
    if device.type == "cpu" and dtype == torch.bfloat16:
        return bfloat16_products()
    return autocast(device, dtype)
