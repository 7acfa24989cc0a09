"""The process groups of a generation: torch's default group and all of smp's, of its members only."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from datetime import timedelta

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store

from opensmd.collectives.backend import register
from opensmd.collectives.name import NAME
from opensmd.collectives.stores.replica_store import JobPlace, Replica
from opensmd.modelparallel.ranks.grid import RankGrid

__all__ = ["leave_groups", "make_world"]


def make_world(
    store: Store, name: str, place: JobPlace, members: Sequence[Replica], grid: RankGrid, timeout: timedelta
) -> int:
    """Create torch's default group of these replicas; all their ranks must call.

    Args:
        store: the job's.
        name: a unique name of the generation.
        place: this rank's position.
        members: the replicas, including this rank's.
        grid: the grid of so many replicas.
        timeout: the group's timeout.

    Returns:
        This process's rank in the group.
    """
    register()
    replica = members.index(place.replica)
    rank = next(
        rank
        for rank in range(grid.size)
        if (grid.coordinates(rank).data, grid.coordinates(rank).pipeline) == (replica, place.rank)
    )
    dist.init_process_group(
        NAME, store=PrefixStore(name, store), rank=rank, world_size=grid.size, timeout=timeout
    )
    return rank


def leave_groups() -> None:
    """Abort all of torch's groups; others that wait in one of them notice at once."""
    if dist.is_initialized():
        with contextlib.suppress(RuntimeError):  # the group may already be aborted
            dist.destroy_process_group()
