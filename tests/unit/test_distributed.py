"""The place of a process in a job; several processes are tested under tests/integration."""

from __future__ import annotations

import pytest

from mttrain.distributed import joined_world
from mttrain.errors import ConfigError


def test_a_job_without_a_launcher_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Schedulers set WORLD_SIZE for programs that are no job of torchrun's: it ended in a
    traceback of PyTorch's rendezvous."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    with pytest.raises(ConfigError, match=r"MASTER_ADDR.*torchrun"), joined_world("cpu"):
        pass
    with joined_world("cpu", alone=True) as world:
        assert (world.rank, world.size) == (0, 1)
