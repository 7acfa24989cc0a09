"""Creating a group's backend: shared memory on one host, and torch's Gloo between hosts.

::

    identities -> plan --- a member lacks the core ---> Gloo alone
                   |
                   arena --- one host ----------------> shared memory
                   |
                   Gloo, measured --------------------> shared memory within hosts, if all have an arena, and
                   Gloo between them
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from types import ModuleType
from typing import TYPE_CHECKING, Any

from torch._C._distributed_c10d import PrefixStore, Store

from opensmd.collectives import _torch_internals
from opensmd.collectives.exchange import Exchange
from opensmd.collectives.hosts.measuring import agree_on_thresholds
from opensmd.collectives.making import torch_backends
from opensmd.collectives.making.arena import group_of_host
from opensmd.collectives.making.membership import Membership
from opensmd.collectives.recording.begin import record_smddp
from opensmd.collectives.stores._torch_internals import remember_store
from opensmd.collectives.topology import GroupPlan, exchange_identities, make_plan, own_identity
from opensmd.environment.settings import Settings
from opensmd.native.availability import core_or_reason
from opensmd.said_once import warn_once

if TYPE_CHECKING:
    from opensmd.native.core import Group, SmddpBackend

__all__ = ["make_group"]


def make_group(place: Membership) -> Any:
    """Create a group's backend; all members must call this together.

    Raises:
        DistBackendError: a member did not come, or cannot be reached.
    """
    settings = Settings.from_environment()
    native, reason = core_or_reason(settings)
    exchange = Exchange(place.store, place.rank, place.ranks, timeout=place.timeout, group=place.name)
    plan = make_plan(exchange_identities(exchange, own_identity(settings, native=reason)))
    exchange.within("the store's name", lambda: remember_store(place.store))
    if native is not None and not plan.without_core:
        return _Making(native, settings, place, exchange, plan).backend()
    if place.rank == 0:
        _warn_without_core(plan, place.ranks, settings)
    gloo = torch_backends.gloo(place, exchange, plan)
    exchange.meet("connected")
    return gloo


class _Making:
    """A group of the core during its creation."""

    def __init__(
        self, native: ModuleType, settings: Settings, place: Membership, exchange: Exchange, plan: GroupPlan
    ) -> None:
        self._native, self._settings = native, settings
        self._place, self._exchange, self._plan = place, exchange, plan

    def backend(self) -> SmddpBackend:
        place, plan, members = self._place, self._plan, self._members()
        local = group_of_host(
            self._native, place, self._exchange, plan, members["names"], self._settings.heap_bytes
        )
        if local is not None and plan.one_host:
            backend: SmddpBackend = self._native.make_shared_backend(group=local, **members)
        else:
            backend = self._over_gloo(local, members)
        record_smddp(backend, place.name, place.global_rank, place.ranks)
        return backend

    def _over_gloo(self, local: Group | None, members: dict[str, Any]) -> SmddpBackend:
        """Create a backend that uses Gloo between hosts, and ``local`` within this one (None: also Gloo)."""
        place, settings = self._place, self._settings
        gloo = torch_backends.gloo(place, self._exchange, self._plan)
        hosts = self._plan.local_groups if local is not None else [(rank,) for rank in range(place.size)]
        report = f"group {place.name!r}" if settings.network_report else ""
        # A script may end as soon as its group exists, while others still connect to its process.
        chosen = agree_on_thresholds(gloo, self._exchange, place.rank, hosts, settings.network, report=report)
        backend: SmddpBackend = self._native.make_gloo_backend(
            gloo=gloo,
            connections=_torch_internals.connections_of(gloo),
            store=PrefixStore(f"opensmd/failures/{self._exchange.generation}", place.store),
            local=local,
            hosts=hosts,
            **asdict(chosen),
            **members,
        )
        return backend

    def _members(self) -> dict[str, Any]:
        """Return what the core's backends are told about the group, and call when they need Python."""
        place, exchange = self._place, self._exchange
        return {
            "names": _names(place, self._plan),
            "rank": place.rank,
            "size": place.size,
            "options": self._native.Options(place.timeout, self._settings.compression or "none"),
            "device_backend": lambda: torch_backends.nccl(place, exchange),
            "meet_on_device": lambda: exchange.meet_later("the first collective of CUDA tensors"),
            "split": lambda store, rank, ranks, given: _split(place, store, rank, ranks, given),
        }


def _split(place: Membership, store: Store, rank: int, ranks: Sequence[int], options: Any) -> Any:
    return make_group(place.in_part(store, rank, ranks, timeout=options._timeout, name=options.group_name))


def _names(place: Membership, plan: GroupPlan) -> list[str]:
    """Return the members' names in messages: global ranks, with hosts if there are several."""
    if plan.one_host:
        return [f"rank {rank}" for rank in place.ranks]
    return [f"rank {rank} on {host}" for rank, host in zip(place.ranks, plan.hosts, strict=True)]


def _warn_without_core(plan: GroupPlan, ranks: Sequence[int], settings: Settings) -> None:
    reasons: dict[str, list[int]] = {}
    for rank, reason in plan.without_core.items():
        reasons.setdefault(reason, []).append(ranks[rank])
    text = " ".join(f"(ranks {', '.join(map(str, who))}) {why}" for why, who in reasons.items())
    exactly = " OPENSMD_COMPRESSION has no effect then." if settings.compression else ""
    warn_once(
        f"smddp: Gloo, which is much slower, serves the group instead of the native core. {text}{exactly}",
        RuntimeWarning,
    )
