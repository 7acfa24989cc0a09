"""Which cores a rank runs on: planned purely, applied by the rank itself before torch starts its threads.

Unpinned ranks are often scheduled onto one core and then wait for each other. So the launcher deals the cores
it may use out to its local ranks in whole physical cores, in the order of the machine, which keeps a rank
within one socket where the numbers allow. Who has chosen an affinity keeps it: a mask set with ``taskset`` or
a container is never left, only divided, and where an OpenMP affinity variable is set nothing is pinned.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path

__all__ = [
    "allowed_cpus",
    "chosen_by_user",
    "crowding",
    "local_cores",
    "physical_cores",
    "pin",
    "share",
    "threads_per_rank",
]

_OPENMP_AFFINITY = ("GOMP_CPU_AFFINITY", "KMP_AFFINITY", "OMP_PLACES", "OMP_PROC_BIND")

CROWD = 8  # ranks a core, beyond which nobody means to be

Cores = list[tuple[int, ...]]


def share(cores: Cores, local_rank: int, local_size: int) -> tuple[int, ...] | None:
    """The cpus of one of ``local_size`` ranks on ``cores`` (each a tuple of sibling cpus).

    With at least one core a rank, every rank gets the same number of whole neighbouring cores (what is left
    over stays free for the system). With a whole number of ranks a core, neighbours share one. Otherwise
    pinning would load cores unequally: None, and the kernel decides.
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


def threads_per_rank(cores: Cores, local_size: int) -> int:
    """How many threads a rank should compute with: one a physical core it has, at least one."""
    return max(1, len(cores) // local_size)


def crowding(cores: Cores, local_size: int) -> str | None:
    """What to tell a user whose ranks wait for a core most of the time, perhaps by a slip of the pen."""
    if not cores or local_size <= CROWD * len(cores):
        return None
    where = "1 core" if len(cores) == 1 else f"{len(cores)} cores"
    return (
        f"{local_size} ranks take turns on {where}, each of which starts about one rank a second: this takes "
        "a while. -n gives another number of ranks."
    )


def chosen_by_user(environ: Mapping[str, str]) -> str | None:
    """The OpenMP affinity variable that is set, if one is."""
    return next((name for name in _OPENMP_AFFINITY if environ.get(name)), None)


def allowed_cpus() -> list[int]:
    """The cpus this process may run on, in order."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def read_siblings(cpus: Iterable[int], root: str = "/sys/devices/system/cpu") -> dict[int, tuple[int, ...]]:
    """Hardware threads of each cpu's core as the kernel tells; a cpu it does not tell of stands alone."""
    found = {}
    for cpu in cpus:
        try:
            text = (Path(root) / f"cpu{cpu}/topology/thread_siblings_list").read_text()
        except OSError:
            continue
        found[cpu] = parse_list(text)
    return found


def parse_list(text: str) -> tuple[int, ...]:
    """A kernel cpu list: ``"0-2,8"`` is ``(0, 1, 2, 8)``."""
    cpus: list[int] = []
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        cpus += range(int(first), int(last or first) + 1)
    return tuple(cpus)


def local_cores() -> Cores:
    """The physical cores this process may use."""
    cpus = allowed_cpus()
    return physical_cores(cpus, read_siblings(cpus))


def pin(local_rank: int, local_size: int) -> tuple[int, ...] | None:
    """Pin the calling process to its share of the cores it may use; return it, or None if it was left."""
    if not hasattr(os, "sched_setaffinity"):
        return None
    mine = share(local_cores(), local_rank, local_size)
    if mine is not None:
        os.sched_setaffinity(0, mine)
    return mine
