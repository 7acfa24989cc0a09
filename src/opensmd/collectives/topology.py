"""Who shares memory with whom, decided anew for each group.

Ranks tell each other through the group's store where they run; what they say makes the plan (pure), and an
actual attach of every rank to one arena confirms it. LOCAL_WORLD_SIZE and host names are never asked: they
are wrong in containers. A plan that cannot be carried out by one rank is carried out by none.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from types import ModuleType
from typing import Any

from torch._C._distributed_c10d import Store
from torch.distributed import DistStoreError

from opensmd.environment.settings import Settings

__all__ = ["Exchange", "Identity", "Plan", "make_plan", "own_identity", "share_arena"]


@dataclass(frozen=True)
class Identity:
    """Where a rank runs, as it tells its peers.

    Attributes:
        host: equal for exactly those ranks that can see each other's processes.
        pid: the process id there.
        hostname: for messages only.
        native: empty where the compiled core is loaded, else why it is not.
        network: equal for exactly those ranks that have one loopback.
    """

    host: str
    pid: int
    hostname: str
    native: str = ""
    network: str = ""


@dataclass(frozen=True)
class Plan:
    """How a group is served.

    Attributes:
        islands: the group's ranks, those of one host together, in the order of their first ranks.
        without_core: for each rank that lacks the compiled core, the reason; if any, Gloo serves the group.
        one_network: whether all ranks have one loopback.
    """

    islands: tuple[tuple[int, ...], ...]
    without_core: dict[int, str]
    one_network: bool = False

    @property
    def one_host(self) -> bool:
        """Whether one arena can hold all ranks."""
        return len(self.islands) == 1

    @property
    def shares_hosts(self) -> bool:
        """Whether the group spans hosts and several of its ranks share one."""
        return len(self.islands) > 1 and any(len(island) > 1 for island in self.islands)

    @property
    def crossing(self) -> int:
        """How many ranks of every host can have a counterpart on all others."""
        return min(map(len, self.islands))

    def island_of(self, rank: int) -> tuple[int, ...]:
        """The ranks on the host of this one."""
        return next(island for island in self.islands if rank in island)

    def peers_of(self, rank: int) -> tuple[int, ...]:
        """The ranks that have this one's place on their hosts, if all hosts have that place."""
        place = self.island_of(rank).index(rank)
        return tuple(island[place] for island in self.islands) if place < self.crossing else ()


def make_plan(identities: Sequence[Identity]) -> Plan:
    """Group ranks by host; pure."""
    by_host: dict[str, list[int]] = {}
    for rank, identity in enumerate(identities):
        by_host.setdefault(identity.host, []).append(rank)
    missing = {rank: each.native for rank, each in enumerate(identities) if each.native}
    one_network = len({identity.network for identity in identities}) == 1
    return Plan(tuple(tuple(ranks) for ranks in by_host.values()), missing, one_network)


def own_identity(settings: Settings, *, native: str = "") -> Identity:
    """This process's identity: the machine's boot and the namespaces that shared memory depends on."""
    host = settings.host_id
    if host is None:
        host = _space("pid", "ipc")
    return Identity(host, os.getpid(), socket.gethostname(), native, _space("net"))


def _space(*kinds: str) -> str:
    """This machine since its boot, and this process's namespaces of these kinds."""
    try:
        return "/".join([_boot_id(), *(str(Path(f"/proc/self/ns/{kind}").readlink()) for kind in kinds)])
    except OSError:  # no Linux
        return socket.gethostname()


def _boot_id() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:  # sandboxes that hide it
        return socket.gethostname()


class Exchange:
    """What the members of one group tell each other through its store while the group is made.

    A store may be used again for a group of the same name after ``destroy_process_group``: arrivals are
    counted, and every full house opens a generation of keys of its own.
    """

    def __init__(self, store: Store, rank: int, size: int, *, timeout: timedelta, group: str) -> None:
        self._store, self._rank, self._size = store, rank, size
        self._timeout, self._group = timeout, group
        arrival = store.add("opensmd/arrivals", 1)
        self.generation = (arrival - 1) // size

    def all_gather(self, topic: str, text: str) -> list[str]:
        """Every rank's ``text`` on this topic, by rank.

        Raises:
            DistStoreError: a rank did not answer within the group's timeout; the message names it.
        """
        keys = self._keys(topic)
        self._store.set(keys[self._rank], text)
        self._wait(topic, keys)
        return [self._store.get(key).decode() for key in keys]

    def close(self, topic: str) -> None:
        """Say that this rank reads the store no more; on rank 0, wait until all have said so.

        Rank 0's process often serves the store. Without this its script might end, and the store with it,
        while another rank is still reading what the last :meth:`all_gather` brought.

        Raises:
            DistStoreError: on rank 0, as from :meth:`all_gather`.
        """
        keys = self._keys(topic)
        self._store.set(keys[self._rank], "")
        if self._rank == 0:
            self._wait(topic, keys)

    def _keys(self, topic: str) -> list[str]:
        return [f"opensmd/{self.generation}/{topic}/{rank}" for rank in range(self._size)]

    def _wait(self, topic: str, keys: list[str]) -> None:
        try:
            self._store.wait(keys, self._timeout)
        except RuntimeError as error:
            missing = [rank for rank, key in enumerate(keys) if not self._store.check([key])]
            raise DistStoreError(
                f"making group {self._group!r}: {_ranks(missing)} did not join within "
                f"{self._timeout.total_seconds():g} s ({topic}; this is rank {self._rank} of {self._size}). "
                "Look at the output of those ranks, or raise the timeout of init_process_group."
            ) from error

    def identities(self, own: Identity) -> list[Identity]:
        """Every rank's identity, by rank."""
        return [Identity(**json.loads(text)) for text in self.all_gather("identity", json.dumps(asdict(own)))]


def share_arena(
    exchange: Exchange, rank: int, island: Sequence[int], native: ModuleType, shape: Any, *, named: bool
) -> int | str:
    """Let each host's first rank create an arena's file and all open theirs; all succeed or none does.

    Args:
        exchange: of the group.
        rank: this process's rank in the group.
        island: the ranks on its host.
        native: the compiled core.
        shape: its ``ArenaShape``, which counts on the first rank alone.
        named: make the file in /dev/shm, for hosts that do not let a process open the files of another.

    Returns:
        The descriptor, which the caller closes; or why it did not work, the same text on every rank.
    """
    file, failure, offer = None, "", ""
    first = island[0]
    if rank == first:
        try:
            file = native.create_arena_file(shape, named)
            offer = f"{file.token} {file.path}"
        except (OSError, RuntimeError) as error:
            failure = f"rank {rank} could not create the arena: {error}"
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
                failure = f"rank {rank} could not open the arena: {error}"
        failures = [text for text in exchange.all_gather(f"attached-{named}", failure) if text]
        exchange.close(f"told-{named}")
        if failures:
            return failures[0]
        given_up.pop_all()
    return fd


def _ranks(ranks: Sequence[int]) -> str:
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks))
