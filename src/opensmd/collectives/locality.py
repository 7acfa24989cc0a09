"""Which ranks of a job run on one host, as they find out when they meet.

Launchers may not say (a Kubernetes job with one process per pod) or mean something else. So every rank
announces through the default group's store where it runs, and what its environment claims; the claims must
fit the findings. If a host has several elastic agents, the ranks of each count as a separate host, because
that is what their LOCAL_RANK refers to.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore
from torch.distributed.constants import default_pg_timeout

from opensmd.collectives import _torch_internals
from opensmd.collectives.exchange import Exchange
from opensmd.collectives.topology import own_identity
from opensmd.environment.settings import Settings
from opensmd.environment.variables import current_launch

__all__ = ["Claim", "Locality", "host_numbers", "known_locality", "localities", "meet"]


@dataclass(frozen=True)
class Claim:
    """What one rank says about its place.

    Attributes:
        host: equal for exactly those ranks that can see each other's processes.
        hostname: for messages only.
        agent: the elastic agent of the host that started it; empty for none.
        local_rank: LOCAL_RANK from a launcher or the user; None if not given.
        local_size: LOCAL_WORLD_SIZE, likewise.
    """

    host: str
    hostname: str
    agent: str = ""
    local_rank: int | None = None
    local_size: int | None = None

    def contradicts(self, size: int) -> bool:
        """Whether it cannot come from one of ``size`` ranks on a host."""
        beyond = self.local_rank is not None and not 0 <= self.local_rank < size
        return beyond or self.local_size not in (None, size)


@dataclass(frozen=True)
class Locality:
    """One rank's place on its host.

    Attributes:
        rank: its number there, from 0.
        size: the number of ranks there.
        hosts: the number of every rank's host, in the order of their first ranks; empty if unknown.
    """

    rank: int
    size: int
    hosts: tuple[int, ...] = ()


_met: WeakKeyDictionary[dist.ProcessGroup, Locality] = WeakKeyDictionary()


def known_locality() -> Locality | None:
    """Return this rank's place on its host, if the default group's ranks have met to find it."""
    return _met.get(_torch_internals.default_group())


def meet() -> Locality:
    """Find this rank's place on its host, together with all ranks of the default group.

    Returns:
        The place; the same one again for the same default group.

    Raises:
        ValueError: LOCAL_RANK or LOCAL_WORLD_SIZE of some rank does not fit what the ranks found; on all.
        DistBackendError: a rank did not come in time.
    """
    group = _torch_internals.default_group()
    if group not in _met:
        rank, size = dist.get_rank(), dist.get_world_size()
        timeout = _torch_internals.timeout_of(group) or default_pg_timeout
        store = PrefixStore("opensmd/locality", _torch_internals.default_store())
        exchange = Exchange(store, rank, range(size), timeout=timeout, group="the default group")
        own = json.dumps(asdict(own_claim(rank, size, os.environ)))
        claims = [Claim(**json.loads(text)) for text in exchange.all_gather("locality", own)]
        exchange.close("localities")
        _met[group] = replace(localities(claims)[rank], hosts=host_numbers(claims))
    return _met[group]


def own_claim(rank: int, size: int, environ: Mapping[str, str]) -> Claim:
    """Return this process's claim as ``rank`` of ``size``; another group's environment claims nothing."""
    identity = own_identity(Settings.from_environment(environ))
    launch = current_launch(environ)
    if launch is None or (launch.rank, launch.size) != (rank, size):
        return Claim(identity.host, identity.hostname)
    agent = environ.get("GROUP_RANK", "") if "TORCHELASTIC_RUN_ID" in environ else ""
    return Claim(identity.host, identity.hostname, agent, launch.local_rank, launch.local_size)


def localities(claims: Sequence[Claim]) -> list[Locality]:
    """Return every rank's place from the claims of all, by rank; pure.

    Raises:
        ValueError: a claim does not fit.
    """
    by_host: dict[tuple[str, str], list[int]] = {}
    for rank, claim in enumerate(claims):
        by_host.setdefault((claim.host, claim.agent), []).append(rank)
    places: dict[int, Locality] = {}
    for ranks in by_host.values():
        places.update(_on_one_host(ranks, claims))
    return [places[rank] for rank in range(len(claims))]


def host_numbers(claims: Sequence[Claim]) -> tuple[int, ...]:
    """Return the number of every rank's host, from the ranks' claims; pure."""
    order = list(dict.fromkeys(claim.host for claim in claims))
    return tuple(order.index(claim.host) for claim in claims)


def _on_one_host(ranks: Sequence[int], claims: Sequence[Claim]) -> dict[int, Locality]:
    size = len(ranks)
    numbers: dict[int, int] = {}  # by local rank
    for index, rank in enumerate(ranks):
        claimed = claims[rank].local_rank
        number = index if claimed is None else claimed
        if claims[rank].contradicts(size):
            raise ValueError(_contradiction(rank, ranks, claims))
        if number in numbers:
            first = numbers[number]
            raise ValueError(
                _contradiction(rank if claims[first].local_rank is None else first, ranks, claims)
            )
        numbers[number] = rank
    return {rank: Locality(number, size) for number, rank in numbers.items()}


def _contradiction(rank: int, ranks: Sequence[int], claims: Sequence[Claim]) -> str:
    claim = claims[rank]
    claimed = [
        f"{name}={value}"
        for name, value in (("LOCAL_RANK", claim.local_rank), ("LOCAL_WORLD_SIZE", claim.local_size))
        if value is not None
    ]
    local_ranks = {other: claims[other].local_rank for other in ranks}
    others = ", ".join(
        f"rank {other} ({'no LOCAL_RANK' if number is None else f'LOCAL_RANK={number}'})"
        for other, number in local_ranks.items()
    )
    return (
        f"the environment of rank {rank} says {' and '.join(claimed)}, but when the ranks met, its host "
        f"{claim.hostname!r} had {len(ranks)} of them: {others}. Unset LOCAL_RANK and LOCAL_WORLD_SIZE, or "
        "correct them. Containers of one machine count as one host if they share its process ids and IPC, or "
        "if OPENSMD_HOST_ID is the same in them."
    )
