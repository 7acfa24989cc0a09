"""Many small checks in one call of a pool, so that a failed one says its name and the others still run."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

__all__ = ["tried"]


def tried(checks: Sequence[Callable[[], object]]) -> list[str]:
    """Run checks on every rank, one after the other; return what failed anywhere, the same on all ranks.

    What a device has still to do belongs to the check that asked for it. All ranks end a check together, by
    pickles, which go through memory of the host.
    """
    failures: list[str] = []
    for check in checks:
        mine = _failure(check)
        everyones: list[str] = [""] * dist.get_world_size()
        dist.all_gather_object(everyones, mine)
        failures += [
            f"{check.__name__} on rank {rank}:\n{text}" for rank, text in enumerate(everyones) if text
        ]
    return failures


def _failure(check: Callable[[], object]) -> str:
    try:
        check()
        torch.cuda.synchronize()
    except Exception:
        return traceback.format_exc()
    return ""
