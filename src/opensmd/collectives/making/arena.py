"""The shared memory of one host's members: made by the first of them, opened by the others.

That every rank has attached confirms the plan (``topology``): what one rank cannot carry out, none does.
"""

from __future__ import annotations

import contextlib
import os
import resource
import warnings
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import psutil

from opensmd.collectives.exchange import Exchange
from opensmd.collectives.making.membership import Membership
from opensmd.collectives.topology import GroupPlan

__all__ = ["arena_of_host", "share_arena"]

# As many as one arena takes; larger groups of one host are served by Gloo.
MOST_IN_ARENA = 64
LEAST_HEAP = 1 << 20  # bytes


def arena_of_host(
    native: ModuleType, place: Membership, exchange: Exchange, plan: GroupPlan, heap_bytes: int | None
) -> int | None:
    """The descriptor of this host's arena, which the caller closes; None where shared memory cannot serve.

    Args:
        native: the compiled core.
        place: this process's.
        exchange: of the group.
        plan: who shares a host.
        heap_bytes: that the user wants for each rank's tensors; None: as many as usual.

    Warns:
        UserWarning: a rank could not have it.
    """
    if not _may_share(plan):
        return None
    local = plan.local_group_of(place.rank)
    shape = native.ArenaShape()
    shape.size = len(local)
    shape.heap_bytes = _usual_heap(native, len(local)) if heap_bytes is None else heap_bytes
    shared = share_arena(exchange, place.rank, local, native, shape, named=False)
    if isinstance(shared, int):
        return shared
    named = share_arena(exchange, place.rank, local, native, shape, named=True)
    if isinstance(named, int):
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
    """The core's own choice, or less where this process is not allowed so much (``ulimit -v``, ``-f``)."""
    used = {resource.RLIMIT_AS: psutil.Process().memory_info().vms, resource.RLIMIT_FSIZE: 0}
    softs = {which: resource.getrlimit(which)[0] for which in used}
    left = [soft - used[which] for which, soft in softs.items() if soft != resource.RLIM_INFINITY]
    return min(
        [int(native.default_heap_bytes(size)), *(max(each // (4 * size), LEAST_HEAP) for each in left)]
    )


def share_arena(
    exchange: Exchange, rank: int, local: Sequence[int], native: ModuleType, shape: Any, *, named: bool
) -> int | str:
    """Let each host's first rank create an arena's file and all open theirs; all succeed or none does.

    Args:
        exchange: of the group.
        rank: this process's rank in the group.
        local: the ranks on its host.
        native: the compiled core.
        shape: its ``ArenaShape``, which counts on the first rank alone.
        named: make the file in /dev/shm, for hosts that do not let a process open the files of another.

    Returns:
        The descriptor, which the caller closes; or why it did not work, the same text on every rank.
    """
    file, failure, offer = None, "", ""
    first = local[0]
    if rank == first:
        try:
            file = native.create_arena_file(shape, named)
            offer = f"{file.token} {file.path}"
        except (OSError, RuntimeError) as error:
            failure = f"rank {exchange.rank} could not create the arena: {error}"
    with contextlib.ExitStack() as given_up, contextlib.ExitStack() as in_any_case:
        if file:
            given_up.callback(os.close, file.fd)
            in_any_case.callback(native.unlink_arena_file, file)
        fd = file.fd if file else -1
        offer = exchange.all_gather(f"arena-{named}", offer)[first]
        if rank != first and offer:
            token, path = offer.split(" ", 1)
            try:
                fd = native.open_arena_file(path, int(token))
                given_up.callback(os.close, fd)
            except (OSError, RuntimeError) as error:
                failure = f"rank {exchange.rank} could not open the arena: {error}"
        failures = [text for text in exchange.all_gather(f"attached-{named}", failure) if text]
        exchange.close(f"told-{named}")
        if failures:
            return failures[0]
        given_up.pop_all()
    return fd
