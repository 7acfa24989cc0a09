"""The process groups of a generation: torch's default group and all of smp's, over its members alone."""

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
    """Make torch's default group of these replicas; collective over all their ranks.

    Args:
        store: the job's.
        name: of the generation, under which nobody else meets.
        place: of this rank.
        members: this rank's replica among them.
        grid: of so many replicas.
        timeout: of the group.

    Returns:
        The rank in it.
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
    """Give up all groups of torch; others that wait in one of them learn it at once."""
    if dist.is_initialized():
        with contextlib.suppress(RuntimeError):  # a group that is aborted already
            dist.destroy_process_group()
