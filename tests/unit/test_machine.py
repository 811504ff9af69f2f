"""Threads and memory of the CPU: what is chosen, and that it is said."""

from __future__ import annotations

import pytest
import torch

from mttrain import cores, machine


@pytest.fixture
def threads(monkeypatch: pytest.MonkeyPatch):
    """Eight cores are seen, and what is set is noted instead."""
    chosen: list[int] = []
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 8)
    monkeypatch.setattr(torch, "set_num_threads", chosen.append)
    return chosen


@pytest.mark.parametrize(
    ("wanted", "processes", "quota", "count", "reason"),
    [
        (None, 1, None, [], "8 CPU threads (one per core)"),
        (3, 1, 2.0, [3], "3 CPU threads (as asked for)"),
        (None, 1, 2.5, [2], "2 CPU threads (this container may use 2.5 of 8 cores)"),
        (None, 1, 0.5, [1], "1 CPU thread (this container may use 0.5 of 8 cores)"),
        (None, 1, 16.0, [], "8 CPU threads (one per core)"),
        (None, 2, None, [4], "4 CPU threads (one per core, shared by 2 processes)"),
        (None, 16, None, [1], "1 CPU thread (one per core, shared by 16 processes)"),
    ],
)
def test_threads_follow_the_wish_the_container_and_the_processes(
    monkeypatch: pytest.MonkeyPatch,
    threads: list[int],
    wanted: int | None,
    processes: int,
    quota: float | None,
    count: list[int],
    reason: str,
) -> None:
    """In a container torch starts a thread for each core of the host, and all of them wait."""
    for module in (cores, machine):
        monkeypatch.setattr(module, "cpu_quota", lambda: quota)
    said = machine.prepare_cpu(wanted, processes)
    assert said.startswith(reason)
    assert threads == count


def test_the_environment_has_the_last_word(
    monkeypatch: pytest.MonkeyPatch, threads: list[int]
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "8")
    monkeypatch.setattr(cores, "cpu_quota", lambda: 2.0)
    assert machine.prepare_cpu(None, 4).startswith("8 CPU threads (OMP_NUM_THREADS)")
    assert threads == []


def test_memory_that_the_user_tunes_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLIBC_TUNABLES", "glibc.malloc.trim_threshold=1")
    assert not machine._keep_memory.__wrapped__()
