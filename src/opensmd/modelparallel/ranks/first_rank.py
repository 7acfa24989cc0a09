"""Letting a group's first rank compute something, for as long as it takes, while the others wait for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

from opensmd.modelparallel.exceptions import PeerFailed
from opensmd.modelparallel.ranks.heartbeat import keep_waiting, wait_for

__all__ = ["from_first_rank"]

T = TypeVar("T")


def from_first_rank(call: Callable[[], T], group: dist.ProcessGroup, *, does: str, could_not: str) -> T:
    """Return, on all ranks of ``group``, what ``call`` returns on the first; it must be picklable.

    Args:
        call: what the first rank runs. It may not use ``group``.
        group: all its ranks must call this.
        does: what the first rank does, for the waiting ranks: "plans the partitions".
        could_not: what it has failed to do if ``call`` raises: "partition the model".

    Raises:
        PeerFailed: ``call`` failed on the first rank, which raises the cause itself.
    """
    found: list[Any] = [None, None]  # the value, or an error's text
    failure: BaseException | None = None
    if dist.get_rank(group) == 0:
        with keep_waiting(group):
            try:
                found[0] = call()
            except BaseException as error:
                failure, found[1] = error, f"{type(error).__name__}: {error}"
    else:
        wait_for(0, group, does)
    dist.broadcast_object_list(found, group=group, group_src=0)
    if failure is not None:
        raise failure
    value, text = found
    if text is not None:
        raise PeerFailed(f"rank 0 could not {could_not}: {text}")
    result: T = value
    return result
