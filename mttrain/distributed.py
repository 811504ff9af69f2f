"""Processes and devices: torchrun's environment, the process group, reductions, autocast.

One process is the normal case and costs nothing: every reduction returns its input. Under torchrun
gradients travel by NCCL between GPUs and by gloo between CPUs; the few numbers that ranks agree on
always travel by gloo, in float64, so that no GPU is waited for. Texts travel as JSON bytes in
tensors: the object collectives of torch.distributed would pickle.

A rank that waits for another gives up after `PATIENCE`; while rank 0 learns a vocabulary or encodes
a corpus the others look into the store of the job instead (`wait_for_main`), which may take long.
"""

from __future__ import annotations

import gc
import json
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]

from mttrain.errors import ConfigError, MttrainError, gist
from mttrain.linear import bfloat16_is_fast, bfloat16_products
from mttrain.rendezvous import meet

# Of one exchange between ranks. Within an update and a validation all have equally much to do, so
# that one that keeps the others waiting for longer has died where nobody saw it, on another node.
PATIENCE = timedelta(minutes=30)
_PAUSE = 0.2  # seconds between two looks whether rank 0 is ready
_FAILED = "failed"  # set in the store when rank 0 ends before its work is done
_CPU = torch.device("cpu")
# What torchrun sets, and what holds without it.
_PLACE = {"WORLD_SIZE": 1, "RANK": 0, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1}


@dataclass(frozen=True)
class World:
    """This process's place: rank of size, and the device it computes on.

    store: of the process group, for long waits; None in a world of one process.
    """

    rank: int
    size: int
    device: torch.device
    store: Store | None = field(default=None, compare=False, repr=False)

    @property
    def is_main(self) -> bool:
        """True in the one process that writes files."""
        return self.rank == 0

    def sum(self, values: Sequence[float]) -> list[float]:
        """Element-wise sums over all ranks, in float64."""
        return self._reduced(values, dist.ReduceOp.SUM)

    def largest(self, value: float) -> float:
        """The largest of the values of all ranks."""
        return self._reduced([value], dist.ReduceOp.MAX)[0]

    def _reduced(self, values: Sequence[float], how: dist.ReduceOp.RedOpType) -> list[float]:
        if self.size == 1:
            return list(values)
        total = torch.tensor(list(values), dtype=torch.float64, device=_CPU)
        dist.all_reduce(total, how)
        return [float(v) for v in total.tolist()]

    def barrier(self) -> None:
        """Wait until every rank is here."""
        self.sum([0.0])

    def wait_for_main(self, what: str) -> None:
        """Wait, for days if it must be, until rank 0 has come here too; then for all.

        what: a word for the work of rank 0, another one at each call.
        """
        if self.store is not None:
            if self.is_main:
                self.store.set(what, "done")
            while not self.store.check([what]):  # its own wait would be deaf to signals
                if self.store.check([_FAILED]):
                    raise MttrainError(
                        f"rank {self.rank}: rank 0 of this job has ended; its message says why."
                    )
                time.sleep(_PAUSE)
        self.barrier()

    def from_main(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor of rank 0, in the place of one of its shape and type in a CPU's memory."""
        if self.size > 1:
            dist.broadcast(tensor, 0)
        return tensor

    def gather_texts(self, texts: Sequence[str]) -> list[list[str]]:
        """The lists of all ranks, in rank order, on every rank."""
        if self.size == 1:
            return [list(texts)]
        data = json.dumps(list(texts)).encode()
        sizes = torch.zeros(self.size, dtype=torch.int64, device=_CPU)
        sizes[self.rank] = len(data)
        dist.all_reduce(sizes)
        longest = int(sizes.max())
        mine = torch.zeros(longest, dtype=torch.uint8, device=_CPU)
        mine[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        parts = [torch.empty_like(mine) for _ in range(self.size)]
        dist.all_gather(parts, mine)
        return [
            json.loads(bytes(part[:size].numpy()))
            for part, size in zip(parts, sizes.tolist(), strict=True)
        ]


def choose_device(name: str, local_rank: int = 0) -> torch.device:
    """Device of a configuration's name, from now on the current one: auto = CUDA when there is one,
    else CPU.

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
    if device.type == "cuda":  # whatever names no device means this one: streams, events
        torch.cuda.set_device(device)
    return device


@contextmanager
def joined_world(device: str, alone: bool = False) -> Iterator[World]:
    """torchrun's process group where there is one, else, or `alone`, a world of one process; left
    at the end, when whoever used it must be gone, but for cycles of references.

    Raises ConfigError for a device that this machine lacks or processes would share; MttrainError
    where another process is gone or cannot be reached: that one has more to tell.
    """
    size, rank, local_rank, here = (
        default if alone else int(os.environ.get(name, default)) for name, default in _PLACE.items()
    )
    chosen = choose_device(device, local_rank)
    on_gpu = chosen.type == "cuda"
    if on_gpu and here > 1 and device.startswith("cuda:"):
        raise ConfigError(
            f"train.device {device} is one GPU, which the {here} processes of this machine would "
            "share; use cuda, which gives each its own"
        )
    if size == 1:
        yield World(rank, size, chosen)
        return
    if "MASTER_ADDR" not in os.environ:
        raise ConfigError(
            f"WORLD_SIZE is {size}, but MASTER_ADDR is not set: start the processes by torchrun, "
            "or unset WORLD_SIZE to train in one"
        )
    done = False
    try:
        store = meet(rank, size, PATIENCE)
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if on_gpu else "gloo",
            store=store,
            rank=rank,
            world_size=size,
            timeout=PATIENCE,
            # NCCL connects now: what is wrong with it is not to show after hours of encoding.
            device_id=chosen if on_gpu else None,
        )
        own = PrefixStore("mttrain", store)
        with _failure_told(own if rank == 0 else None):
            yield World(rank, size, chosen, own)
        done = True
    except RuntimeError as error:
        if not isinstance(error, dist.DistError) and "gloo" not in str(error).lower():
            raise
        raise MttrainError(
            f"rank {rank}: another process of this job has ended or cannot be reached "
            f"({gist(error)}); its message, or the one of what started it, says why. The "
            "same command goes on from the last checkpoint."
        ) from error
    finally:
        # What still refers to the group keeps its threads, and one that works on when the
        # interpreter is gone aborts the process.
        gc.collect()
        if on_gpu and not done and dist.is_initialized():
            # Not wait for what NCCL has begun: a process that is gone will never end it.
            dist.distributed_c10d._abort_process_group()
        elif dist.is_initialized():
            dist.destroy_process_group()


@contextmanager
def _failure_told(store: Store | None) -> Iterator[None]:
    """Say in the store that this process ends before its time, for those who wait for its work."""
    try:
        yield
    except BaseException:
        if store is not None:
            with suppress(RuntimeError):  # whoever kept it may be gone, too
                store.set(_FAILED, "yes")
        raise


def compute_type(precision: str, device: torch.device) -> torch.dtype:
    """Type of the matrix products: auto = bfloat16 on a GPU that has it, float32 elsewhere.

    int8 is for decoding on a CPU: ConfigError elsewhere.
    """
    if precision == "auto":
        # A GPU without such products would emulate them.
        bf16 = device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
        return torch.bfloat16 if bf16 else torch.float32
    if precision == "int8" and device.type != "cpu":
        raise ConfigError(f"precision int8 runs on a CPU, not on {device.type}; use auto or bf16")
    types = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
    return torch.int8 if precision == "int8" else types[precision]


def autocast(device: torch.device, dtype: torch.dtype) -> AbstractContextManager[object]:
    """Run the matrix products of the block in `dtype`; float32 and int8 need no help."""
    if dtype in (torch.float32, torch.int8):
        return nullcontext()
    # A weight is used once in a pass: kept copies would be a second model in memory until its end.
    return torch.autocast(device.type, dtype=dtype, cache_enabled=False)


def allow_tf32(wanted: bool, device: torch.device) -> None:
    """Let a GPU round the factors of float32 products, or forbid it; other devices cannot."""
    if device.type == "cuda":
        torch.set_float32_matmul_precision("high" if wanted else "highest")


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
