"""Who shares memory with whom, decided separately for each group.

Ranks tell each other through the group's store where they run. A pure function turns that into a plan, and
every rank's actual attach to one arena (``making.arena``) confirms it. LOCAL_WORLD_SIZE and host names are
never used, because they are wrong in containers. If one rank cannot carry out the plan, none does.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from opensmd.collectives.exchange import Exchange
from opensmd.collectives.stores.listening import gloo_is_on_loopback
from opensmd.cpus import allowed_cpus, cores_at_once, cpu_quota
from opensmd.environment.boot import boot_id
from opensmd.environment.settings import Settings

__all__ = ["Identity", "GroupPlan", "exchange_identities", "make_plan", "own_identity"]


@dataclass(frozen=True)
class Identity:
    """Where a rank runs, as it tells its peers.

    Attributes:
        host: equal for exactly those ranks that can see each other's processes.
        pid: the process id there.
        hostname: for messages only.
        native: empty if the compiled core is loaded, else why it is not.
        network: equal for exactly those ranks that share a loopback.
        on_loopback: whether Gloo listens there, where only ranks of the same network reach it.
        cpus: a bit for each on which it may run.
        quota: how many cpus' worth of time its container may use; None without a limit.
    """

    host: str
    pid: int
    hostname: str
    native: str = ""
    network: str = ""
    on_loopback: bool = False
    cpus: int = 0
    quota: float | None = None


@dataclass(frozen=True)
class GroupPlan:
    """How a group is served.

    Attributes:
        local_groups: the group's ranks by host, in the order of their first ranks.
        without_core: for each rank that lacks the compiled core, the reason; if any, Gloo serves the group.
        hosts: for each rank, its host's name in messages.
        cores: for each of ``local_groups``, on how many cores its ranks may compute at the same time.
        one_network: whether all ranks share a loopback.
        hidden: ranks whose Gloo those of other networks cannot reach.
        cut_off: whether two of those would have to connect, which is impossible.
    """

    local_groups: tuple[tuple[int, ...], ...]
    without_core: dict[int, str]
    hosts: tuple[str, ...]
    cores: tuple[int, ...]
    one_network: bool = False
    hidden: tuple[int, ...] = ()
    cut_off: bool = False

    @property
    def one_host(self) -> bool:
        """Whether one arena can hold all ranks."""
        return len(self.local_groups) == 1

    @property
    def shares_hosts(self) -> bool:
        """Whether the group spans hosts and several of its ranks share one."""
        return len(self.local_groups) > 1 and any(len(local) > 1 for local in self.local_groups)

    def local_group_of(self, rank: int) -> tuple[int, ...]:
        """Return the ranks on this rank's host."""
        return next(local for local in self.local_groups if rank in local)

    def cores_of(self, rank: int) -> int:
        """Return on how many cores the ranks of this rank's host may compute at the same time."""
        return self.cores[self.local_groups.index(self.local_group_of(rank))]


def make_plan(identities: Sequence[Identity]) -> GroupPlan:
    """Group ranks by host; pure."""
    by_host: dict[str, list[int]] = {}
    for rank, identity in enumerate(identities):
        by_host.setdefault(identity.host, []).append(rank)
    missing = {rank: member.native for rank, member in enumerate(identities) if member.native}
    names = _host_names({host: identities[ranks[0]].hostname for host, ranks in by_host.items()})
    networks = {identity.network for identity in identities}
    hidden = [rank for rank, member in enumerate(identities) if len(networks) > 1 and member.on_loopback]
    return GroupPlan(
        local_groups=tuple(tuple(ranks) for ranks in by_host.values()),
        without_core=missing,
        hosts=tuple(names[identity.host] for identity in identities),
        cores=tuple(_shared_cores([identities[rank] for rank in ranks]) for ranks in by_host.values()),
        one_network=len(networks) == 1,
        hidden=tuple(hidden),
        cut_off=len({identities[rank].network for rank in hidden}) > 1,
    )


def _shared_cores(members: Sequence[Identity]) -> int:
    """Return on how many cores these may compute at the same time: launchers give each some of all."""
    masks = [member.cpus for member in members]
    together = {cpu for mask in masks for cpu in range(mask.bit_length()) if mask >> cpu & 1}
    quotas = [member.quota for member in members if member.quota is not None]
    return cores_at_once(together, min(quotas, default=None))


def _host_names(hostnames: dict[str, str]) -> dict[str, str]:
    """Return each host's name, numbered if another host has the same."""
    taken = list(hostnames.values())
    numbers = {host: taken[:index].count(name) for index, (host, name) in enumerate(hostnames.items())}
    return {
        host: name if taken.count(name) == 1 else f"{name}#{numbers[host] + 1}"
        for host, name in hostnames.items()
    }


def own_identity(settings: Settings, *, native: str = "") -> Identity:
    """Return this process's identity: the machine's boot and the namespaces that shared memory depends on."""
    host = settings.host_id
    if host is None:
        host = _space("pid", "ipc")
    network, on_loopback = _space("net"), gloo_is_on_loopback(os.environ)
    cpus = sum(1 << cpu for cpu in allowed_cpus())
    return Identity(host, os.getpid(), socket.gethostname(), native, network, on_loopback, cpus, cpu_quota())


def _space(*kinds: str) -> str:
    """Return the machine's boot and this process's namespaces of these kinds."""
    try:
        return "/".join([boot_id(), *(str(Path(f"/proc/self/ns/{kind}").readlink()) for kind in kinds)])
    except OSError:  # not Linux
        return socket.gethostname()


def exchange_identities(exchange: Exchange, own: Identity) -> list[Identity]:
    """Return every rank's identity, by rank."""
    return [Identity(**json.loads(text)) for text in exchange.all_gather("identity", json.dumps(asdict(own)))]
