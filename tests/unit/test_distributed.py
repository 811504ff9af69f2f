"""The place of a process in a job; several processes are tested under tests/integration."""

from __future__ import annotations

import signal
import threading
from types import FrameType

import pytest
import torch
from torch.distributed import HashStore, PrefixStore  # type: ignore[attr-defined]

from mttrain import distributed
from mttrain.distributed import World, joined_world
from mttrain.errors import ConfigError, DataError, MttrainError


def test_a_job_without_a_launcher_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Schedulers set WORLD_SIZE for programs that are no job of torchrun's: it ended in a
    traceback of PyTorch's rendezvous."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    with pytest.raises(ConfigError, match=r"MASTER_ADDR.*torchrun"), joined_world("cpu"):
        pass
    with joined_world("cpu", alone=True) as world:
        assert (world.rank, world.size) == (0, 1)


class Told(Exception):
    """What the handler of a signal raises."""


def waiting() -> World:
    """Rank 1 of two, whose rank 0 is not ready."""
    return World(1, 2, torch.device("cpu"), PrefixStore("mttrain", HashStore()))


def test_a_signal_ends_the_wait_for_rank_0() -> None:
    """The store's own wait is deaf: a job that was stopped while rank 0 encoded was killed half a
    minute later, without a word."""

    def handle(number: int, frame: FrameType | None) -> None:
        raise Told

    former = signal.signal(signal.SIGTERM, handle)
    ident = threading.get_ident()
    timer = threading.Timer(0.3, lambda: signal.pthread_kill(ident, signal.SIGTERM))
    timer.start()
    try:
        with pytest.raises(Told):
            waiting().wait_for_main("text")
    finally:
        timer.join()
        signal.signal(signal.SIGTERM, former)


def test_the_end_of_rank_0_ends_the_wait() -> None:
    """On another node than the one that keeps the store, it was waited for for a week."""
    store = HashStore()
    with pytest.raises(DataError), distributed._failure_told(PrefixStore("mttrain", store)):
        raise DataError("not UTF-8")
    with pytest.raises(MttrainError, match=r"rank 1: rank 0 of this job has ended"):
        World(1, 2, torch.device("cpu"), PrefixStore("mttrain", store)).wait_for_main("text")
