"""Work on files that all ranks of a group do or none: if it fails on one, all of them raise."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

from opensmd.modelparallel.exceptions import PeerCheckpointError

__all__ = ["exchange", "together"]

Result = TypeVar("Result")


def together(group: dist.ProcessGroup, work: Callable[[], Result], *, failed: str, rank: str) -> Result:
    """Do ``work``, wait for the others of ``group``, and return its result if all have succeeded.

    Args:
        failed: what a rank says whose own work has succeeded.
        rank: what ranks of this group are called, such as "mp_rank".

    Raises:
        PeerCheckpointError: the work of others has failed; this rank's own error is raised as it is.
    """
    failure: Exception | None = None
    results: list[Result] = []
    try:
        results.append(work())
    except Exception as error:
        failure = error
    failures = exchange(None if failure is None else f"{type(failure).__name__}: {failure}", group)
    if failure is not None:
        raise failure
    if any(failures):
        reasons = "; ".join(f"{rank} {number}: {text}" for number, text in enumerate(failures) if text)
        raise PeerCheckpointError(f"{failed}: {reasons}")
    return results[0]


def exchange(value: Any, group: dist.ProcessGroup) -> list[Any]:
    """The values of all ranks of ``group``."""
    values: list[Any] = list(itertools.repeat(None, dist.get_world_size(group)))
    dist.all_gather_object(values, value, group=group)
    return values
