"""How many cores of the CPU this process may use, without torch, whose import takes 190 MB."""

from __future__ import annotations

import os
from pathlib import Path


def usable_cores() -> int:
    """Cores that the system and the container let this process use, at least one."""
    if hasattr(os, "sched_getaffinity"):
        return within_quota(len(os.sched_getaffinity(0)))
    return within_quota(os.cpu_count() or 1)


def within_quota(cores: int) -> int:
    """So many of these cores as the container may use, at least one."""
    quota = cpu_quota()
    return cores if quota is None else max(1, min(cores, int(quota)))


def cpu_quota(root: Path = Path("/sys/fs/cgroup")) -> float | None:
    """Cores that the control group of this process may use; None: no limit, or not on Linux."""
    try:
        quota, period = (root / "cpu.max").read_text().split()
    except (OSError, ValueError):
        try:  # version 1 of the control groups
            quota = (root / "cpu/cpu.cfs_quota_us").read_text().strip()
            period = (root / "cpu/cpu.cfs_period_us").read_text().strip()
        except OSError:
            return None
    if not (quota.isdigit() and period.isdigit()) or int(period) == 0:
        return None  # "max" and "-1" say: no limit
    return int(quota) / int(period)
