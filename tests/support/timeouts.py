"""Waits that a test wants to expire: their time begins when the ranks have come to them, not at the start."""

from __future__ import annotations

from datetime import timedelta

import torch.distributed as dist

__all__ = ["expire_after"]


def expire_after(seconds: float, *, for_rank: int | None = None) -> None:
    """From now on, waits on this rank's groups end after ``seconds``.

    Args:
        seconds: for each wait.
        for_rank: only on groups that this rank of the job belongs to, too: on the others all are sound, and a
            busy machine may keep them waiting.
    """
    for group in list(dist.distributed_c10d._world.pg_map):
        if for_rank is None or for_rank in dist.get_process_group_ranks(group):
            group.set_timeout(timedelta(seconds=seconds))
