"""``tcp://host:port``: rank 0 serves at an address that all processes know."""

from __future__ import annotations

import os
import time
from collections import Counter

from torch.distributed import DistError

from opensmd.legacy._torch_internals import PrefixStore, Store
from opensmd.legacy.rendezvous.address import Address, check_rank
from opensmd.legacy.rendezvous.rendezvous import HostLost, Joined, Rendezvous
from opensmd.legacy.rendezvous.server import listens, reach, serve
from opensmd.legacy.settings import Deadline

__all__ = ["join_tcp"]

# How often this process has met others at an address, and its last prefix there: a fast rank may come for the
# next rendezvous while rank 0 still serves the last one, and must not join that again.
_rendezvous_so_far: Counter[str] = Counter()
_last_prefix: dict[str, str] = {}


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
    last, _last_prefix[str(address)] = _last_prefix.get(str(address)), prefix
    while True:
        store, serves = _store(address, rank, deadline)
        if (
            last is not None
            and not serves
            and not _agent_serves()
            and _saw_end(store, last, address, deadline)
        ):
            continue
        rendezvous = Rendezvous(
            PrefixStore(prefix, store), where=str(address), serves=serves, deadline=deadline
        )
        try:
            return rendezvous.join(rank, world_size)
        except HostLost:
            # For another rank, this may have been the store of an earlier job, which has just closed it.
            if serves or deadline.passed or not _is_young(deadline):
                raise


def _store(address: Address, rank: int, deadline: Deadline) -> tuple[Store, bool]:
    if rank == 0 and not _agent_serves():
        return serve(address.host, address.port, deadline), True
    what = "the launcher" if _agent_serves() else "rank 0"
    return reach(address.host, address.port, deadline, what=what), False


def _saw_end(store: Store, last: str, address: Address, deadline: Deadline) -> bool:
    """Wait while this is still the store of the last rendezvous; return whether it was.

    Raises:
        RuntimeError: rank 0 has not replaced it in time.
    """
    former = PrefixStore(last, store)
    try:
        while former.check(["arrivals"]):
            if deadline.passed:
                raise RuntimeError(
                    f"{address}: rank 0 is still in the job before, and has not called destroy_process_group "
                    f"and init_process_group for {deadline.seconds:g} s; call both on all ranks, or raise "
                    "OPENSMD_LEGACY_TIMEOUT"
                )
            time.sleep(BETWEEN_LOOKS)
    except DistError:
        return True
    return False


def _is_young(deadline: Deadline) -> bool:
    return deadline.seconds - deadline.remaining() < RECONNECT_SECONDS


RECONNECT_SECONDS = 10.0
BETWEEN_LOOKS = 0.02  # seconds


def _agent_serves() -> bool:
    """Whether torch's elastic agent already serves a store at MASTER_ADDR:MASTER_PORT."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def _restarts() -> str:
    """Return the number of restarts, because the elastic agent serves the same store to every restart."""
    return os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
