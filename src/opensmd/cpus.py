"""How many cpus processes may use: those of their masks, as far as the quota of their container allows."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sized
from pathlib import Path

__all__ = ["allowed_cpus", "cores_at_once", "cpu_quota"]

_GROUP = Path("/sys/fs/cgroup")  # a container's own
_QUOTAS = (
    ["cpu.max"],
    ["cpu/cpu.cfs_quota_us", "cpu/cpu.cfs_period_us"],
)  # in versions 2 and 1 of control groups


def allowed_cpus() -> list[int]:
    """Return the cpus this process may run on, in order."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def cpu_quota(group: Path = _GROUP) -> float | None:
    """Return how many cpus' worth of time this control group may use; None without a limit."""
    for files in _QUOTAS:
        with contextlib.suppress(OSError, ValueError):
            quota, period = (word for file in files for word in (group / file).read_text().split())
            return None if quota in ("max", "-1") else int(quota) / int(period)
    return None


def cores_at_once(cores: Sized, quota: float | None) -> int:
    """Return on how many of ``cores`` processes may compute at the same time, at least one."""
    return max(1, len(cores) if quota is None else min(len(cores), int(quota)))
