"""The shared memory of one host's members: created by the first of them, opened by the others.

The plan (``topology``) is confirmed when every rank has joined: if one rank cannot carry it out, none does.
If a member dies after joining, the others notice.
"""

from __future__ import annotations

import contextlib
import os
import resource
import warnings
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import TYPE_CHECKING, TypeVar

import psutil

from opensmd.collectives.exchange import Exchange
from opensmd.collectives.making.membership import Membership
from opensmd.collectives.topology import GroupPlan
from opensmd.first_line import first_line

if TYPE_CHECKING:
    from opensmd.native.core import ArenaFile, ArenaShape, Group

__all__ = ["group_of_host", "share_arena"]

Joined = TypeVar("Joined")

# The most members of one arena; Gloo serves larger groups on one host.
MOST_IN_ARENA = 64
LEAST_HEAP = 1 << 20  # bytes


def group_of_host(
    native: ModuleType,
    place: Membership,
    exchange: Exchange,
    plan: GroupPlan,
    names: Sequence[str],
    heap_bytes: int | None,
) -> Group | None:
    """Return this process's part in its host's group; None if shared memory cannot be used.

    Args:
        native: the compiled core.
        place: this process's.
        exchange: the group's.
        plan: who shares a host.
        names: those of all members, for messages.
        heap_bytes: the user's size of each rank's heap; None for the default.

    Warns:
        UserWarning: a rank could not use it.
    """
    if not _may_share(plan):
        return None
    local = plan.local_group_of(place.rank)
    shape = native.ArenaShape()
    shape.size = len(local)
    shape.heap_bytes = _usual_heap(native, len(local)) if heap_bytes is None else heap_bytes

    def join(fd: int) -> Group:
        group: Group = native.Group(
            fd=fd,
            names=[names[rank] for rank in local],
            rank=local.index(place.rank),
            timeout=place.timeout,
            cores=plan.cores_of(place.rank),
        )
        return group

    shared = share_arena(exchange, place.rank, local, native, shape, join, named=False)
    if not isinstance(shared, str):
        return shared
    named = share_arena(exchange, place.rank, local, native, shape, join, named=True)
    if not isinstance(named, str):
        return named
    if place.rank == 0:
        warnings.warn(
            f"smddp: Gloo serves group {place.name!r} instead of shared memory: {shared}; {named}",
            stacklevel=3,
        )
    return None


def _may_share(plan: GroupPlan) -> bool:
    """Whether shared memory can serve all ranks, or those of each host."""
    return (plan.one_host or plan.shares_hosts) and max(map(len, plan.local_groups)) <= MOST_IN_ARENA


def _usual_heap(native: ModuleType, size: int) -> int:
    """Return the core's own choice, or less if this process is limited (``ulimit -v``, ``-f``)."""
    used = {resource.RLIMIT_AS: psutil.Process().memory_info().vms, resource.RLIMIT_FSIZE: 0}
    softs = {which: resource.getrlimit(which)[0] for which in used}
    spare = [soft - used[which] for which, soft in softs.items() if soft != resource.RLIM_INFINITY]
    return min(
        [int(native.default_heap_bytes(size)), *(max(nbytes // (4 * size), LEAST_HEAP) for nbytes in spare)]
    )


def share_arena(
    exchange: Exchange,
    rank: int,
    local: Sequence[int],
    native: ModuleType,
    shape: ArenaShape,
    join: Callable[[int], Joined],
    *,
    named: bool,
) -> Joined | str:
    """Let each host's first rank create an arena's file and all join theirs; either all succeed or none.

    Args:
        exchange: the group's.
        rank: this process's rank in the group.
        local: the ranks on its host.
        native: the compiled core.
        shape: its ``ArenaShape``, which counts only on the first rank.
        join: attaches this process to the arena of a descriptor, which may be closed afterwards.
        named: create the file in /dev/shm, for hosts where a process cannot open another's files.

    Returns:
        What ``join`` has returned, or why it failed, the same text on every rank.
    """
    file, joined, failure, offer = None, None, "", ""
    first = local[0]
    if rank == first:
        try:
            file = native.create_arena_file(shape, named)
            offer = f"{file.token} {file.path}"
        except (OSError, RuntimeError) as error:
            failure = f"rank {exchange.rank} could not create the arena: {error}"
    with contextlib.ExitStack() as in_any_case:
        if file:
            in_any_case.callback(os.close, file.fd)
            in_any_case.callback(native.unlink_arena_file, file)
        offer = exchange.all_gather(f"arena-{named}", offer)[first]
        if offer:
            try:
                joined = _joined(file, offer, native, join)
            except (OSError, RuntimeError) as error:
                failure = f"rank {exchange.rank} could not open the arena: {first_line(error)}"
        failures = [text for text in exchange.all_gather(f"attached-{named}", failure) if text]
        exchange.close(f"told-{named}")
    if failures:
        return failures[0]
    assert joined is not None
    return joined


def _joined(file: ArenaFile | None, offer: str, native: ModuleType, join: Callable[[int], Joined]) -> Joined:
    """Return the result of ``join`` on this process's own ``file``, else on the one it was offered."""
    if file:
        return join(file.fd)
    token, path = offer.split(" ", 1)
    fd = native.open_arena_file(path, int(token))
    try:
        return join(fd)
    finally:
        os.close(fd)
