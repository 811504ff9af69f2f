"""How many cores may be used: what the system and the container say."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from mttrain import cores


@pytest.mark.parametrize(
    ("files", "quota"),
    [
        ({"cpu.max": "max 100000\n"}, None),
        ({"cpu.max": "150000 100000\n"}, 1.5),
        ({"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, None),
        ({"cpu/cpu.cfs_quota_us": "400000\n", "cpu/cpu.cfs_period_us": "100000\n"}, 4.0),
        ({}, None),
        ({"cpu.max": "garbage\n"}, None),
    ],
)
def test_quota_of_both_versions_of_control_groups(
    tmp_path: Path, files: dict[str, str], quota: float | None
) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    assert cores.cpu_quota(tmp_path) == quota


@pytest.mark.parametrize(("quota", "count"), [(None, 64), (64.5, 64), (3.5, 3), (0.5, 1)])
def test_the_container_has_the_last_word(
    monkeypatch: pytest.MonkeyPatch, quota: float | None, count: int
) -> None:
    monkeypatch.setattr(cores, "cpu_quota", lambda: quota)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(64), raising=False)
    assert cores.usable_cores() == count


def test_encoding_does_without_torch() -> None:
    """Whose import takes more memory than all the encoding."""
    code = (
        "import sys; from mttrain import encoding, storewriter; encoding.processes_for(1 << 40); "
        "print('torch' in sys.modules)"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout == "False\n"
