"""Waits that a test wants to expire: their time begins when the ranks have come to them, not at the start."""

from __future__ import annotations

from datetime import timedelta

import torch.distributed as dist

__all__ = ["expire_after"]


def expire_after(seconds: float) -> None:
    """From now on, waits on any group of this rank end after ``seconds``."""
    for group in list(dist.distributed_c10d._world.pg_map):
        group.set_timeout(timedelta(seconds=seconds))
