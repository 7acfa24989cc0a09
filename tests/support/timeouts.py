"""Waits that a test wants to expire: their time begins when the ranks have come to them, not at the start."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable
from datetime import timedelta

import torch.distributed as dist

from opensmd.collectives.stall import members
from tests.support.patience import PATIENCE

__all__ = ["await_entry", "expire_after", "meet_in_store"]


def expire_after(
    seconds: float, *, for_rank: int | None = None, groups: Iterable[dist.ProcessGroup] | None = None
) -> None:
    """From now on, waits on this rank's groups end after ``seconds``.

    Args:
        seconds: for each wait.
        groups: these alone; the default is all that there are.
        for_rank: only on groups that this rank of the job belongs to, too: on the others all are sound, and a
            busy machine may keep them waiting.
    """
    for group in list(dist.distributed_c10d._world.pg_map) if groups is None else groups:
        if for_rank is None or for_rank in dist.get_process_group_ranks(group):
            group.set_timeout(timedelta(seconds=seconds))


def meet_in_store(name: str) -> None:
    """Wait until all ranks have come here, each once for a name.

    A rank that is slow to leave a barrier can still lose it when another, which has left, dies or gives up.
    Here it cannot, as long as rank 0 lives, which serves the store.
    """
    store = dist.distributed_c10d._get_default_store()
    store.set(f"{name}/{dist.get_rank()}", "")
    came = [f"{name}/{rank}" for rank in range(dist.get_world_size())]
    store.wait(came, timedelta(seconds=PATIENCE))


def await_entry(group: dist.ProcessGroup, others: Collection[int]) -> None:
    """Wait until other members are in the collective that this rank calls next, so that none is late to it.

    Args:
        group: in shared memory.
        others: their ranks in it.
    """
    before = members(group)[dist.get_rank(group)].entered
    end = time.monotonic() + PATIENCE
    while any(members(group)[other].entered <= before for other in others):
        assert time.monotonic() < end, members(group)
        time.sleep(0.005)
