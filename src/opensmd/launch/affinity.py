"""Which cores a rank runs on: a pure plan, applied by the rank itself before torch starts its threads.

Unpinned ranks often share one core and then wait for each other. So the launcher divides the cores it may use
among its local ranks, in whole physical cores and in the machine's order, which keeps a rank within one
socket where the numbers allow. The user's choice is respected: a mask set with ``taskset`` or a container is
divided but never left, and nothing is pinned if an OpenMP affinity variable is set.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path

from opensmd.cpus import allowed_cpus

__all__ = [
    "chosen_by_user",
    "crowding",
    "local_cores",
    "physical_cores",
    "pin",
    "share",
    "threads_per_rank",
]

_OPENMP_AFFINITY = ("GOMP_CPU_AFFINITY", "KMP_AFFINITY", "OMP_PLACES", "OMP_PROC_BIND")

CROWD = 8  # ranks per core; more are hardly intended

Cores = list[tuple[int, ...]]


def share(cores: Cores, local_rank: int, local_size: int) -> tuple[int, ...] | None:
    """Return the cpus of one of ``local_size`` ranks on ``cores`` (each a tuple of sibling cpus).

    With at least one core per rank, every rank gets the same number of whole neighbouring cores, and the rest
    stays free for the system. With a whole number of ranks per core, neighbours share one. Otherwise pinning
    would load cores unequally, so return None and let the kernel decide.
    """
    per_rank = len(cores) // local_size
    if per_rank:
        mine = cores[local_rank * per_rank : (local_rank + 1) * per_rank]
        return tuple(cpu for core in mine for cpu in core)
    if cores and local_size % len(cores) == 0:
        return cores[local_rank * len(cores) // local_size]
    return None


def physical_cores(cpus: Iterable[int], siblings: Mapping[int, tuple[int, ...]]) -> Cores:
    """Group ``cpus`` by physical core, ordered by each core's first cpu."""
    allowed = set(cpus)
    cores = {tuple(sorted(allowed & {cpu, *siblings.get(cpu, ())})) for cpu in allowed}
    return sorted(cores)


def threads_per_rank(cores: int, local_size: int) -> int:
    """Return how many threads a rank should compute with: one per core that it may use, at least one."""
    return max(1, cores // local_size)


def crowding(cores: Cores, local_size: int) -> str | None:
    """Return a warning for a user whose ranks mostly wait for a core, perhaps because of a typo."""
    if not cores or local_size <= CROWD * len(cores):
        return None
    where = "1 core" if len(cores) == 1 else f"{len(cores)} cores"
    return (
        f"{local_size} ranks take turns on {where}, each of which starts about one rank a second: this takes "
        "a while. -n gives another number of ranks."
    )


def chosen_by_user(environ: Mapping[str, str]) -> str | None:
    """Return the OpenMP affinity variable that is set, if any."""
    return next((name for name in _OPENMP_AFFINITY if environ.get(name)), None)


def read_siblings(cpus: Iterable[int], root: str = "/sys/devices/system/cpu") -> dict[int, tuple[int, ...]]:
    """Return the hardware threads of each cpu's core from the kernel; a cpu unknown to it is alone."""
    siblings = {}
    for cpu in cpus:
        try:
            text = (Path(root) / f"cpu{cpu}/topology/thread_siblings_list").read_text()
        except OSError:
            continue
        siblings[cpu] = parse_list(text)
    return siblings


def parse_list(text: str) -> tuple[int, ...]:
    """Parse a kernel cpu list: ``"0-2,8"`` is ``(0, 1, 2, 8)``."""
    cpus: list[int] = []
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        cpus += range(int(first), int(last or first) + 1)
    return tuple(cpus)


def local_cores() -> Cores:
    """Return the physical cores this process may use."""
    cpus = allowed_cpus()
    return physical_cores(cpus, read_siblings(cpus))


def pin(local_rank: int, local_size: int) -> None:
    """Pin this process to its share of the cores it may use; without an even one, the kernel decides."""
    if not hasattr(os, "sched_setaffinity"):
        return
    mine = share(local_cores(), local_rank, local_size)
    if mine is not None:
        os.sched_setaffinity(0, mine)
