"""``tcp://host:port``: rank 0 serves at an address that all processes know."""

from __future__ import annotations

import os
from collections import Counter

from opensmd.legacy._torch_internals import PrefixStore, Store
from opensmd.legacy.rendezvous.address import Address, check_rank
from opensmd.legacy.rendezvous.rendezvous import HostLost, Joined, Rendezvous
from opensmd.legacy.rendezvous.server import listens, reach, serve
from opensmd.legacy.settings import Deadline

__all__ = ["join_tcp"]

# How often this process has met others at an address: a fast rank may come for the next rendezvous while rank
# 0 still serves the last one, and must not join that again.
_rendezvous_so_far: Counter[str] = Counter()


def join_tcp(address: Address, *, rank: int, world_size: int, group_name: str, deadline: Deadline) -> Joined:
    """Meet at ``address``; ranks must be given.

    Raises:
        ValueError: rank or world_size is missing, or the rank is impossible and nobody is there yet.
        RuntimeError: the port is in use, or the job cannot start.
    """
    if rank < 0:
        raise ValueError(f"{address}: the rank must be given by hand here: pass rank=0 to world_size-1")
    if rank >= world_size and not listens(address.host, address.port):
        check_rank(address, rank, world_size)  # otherwise all learn of it in the rendezvous
    _rendezvous_so_far[str(address)] += 1
    prefix = f"opensmd.legacy/{_rendezvous_so_far[str(address)]}/{_restarts()}/{group_name}"
    while True:
        store, serves = _store(address, rank, deadline)
        rendezvous = Rendezvous(
            PrefixStore(prefix, store), where=str(address), serves=serves, deadline=deadline
        )
        try:
            return rendezvous.join(rank, world_size)
        except HostLost:
            # For another rank, this may have been the last rendezvous's store, which rank 0 has just closed.
            if serves or deadline.passed or not _is_young(deadline):
                raise


def _store(address: Address, rank: int, deadline: Deadline) -> tuple[Store, bool]:
    if rank == 0 and not _agent_serves():
        return serve(address.host, address.port, deadline), True
    what = "the launcher" if _agent_serves() else "rank 0"
    return reach(address.host, address.port, deadline, what=what), False


def _is_young(deadline: Deadline) -> bool:
    return deadline.seconds - deadline.remaining() < RECONNECT_SECONDS


RECONNECT_SECONDS = 10.0


def _agent_serves() -> bool:
    """Whether torch's elastic agent already serves a store at MASTER_ADDR:MASTER_PORT."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def _restarts() -> str:
    """Return the number of restarts, because the elastic agent serves the same store to every restart."""
    return os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
