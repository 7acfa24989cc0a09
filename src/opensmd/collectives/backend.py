"""Registers "smddp" with torch.distributed and makes its process groups.

One c10d::Backend serves a group: CPU tensors through shared memory on one host and through torch's Gloo
between hosts, CUDA tensors through torch's NCCL. Settings come from
:mod:`opensmd.environment.settings` alone.
"""

from __future__ import annotations

import os
import resource
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from functools import cache, partial
from types import ModuleType
from typing import Any

import psutil
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store
from torch.distributed.distributed_c10d import GroupName

from opensmd.collectives import _torch_internals
from opensmd.collectives.exchange import Exchange
from opensmd.collectives.hosts.measuring import agree_on_thresholds
from opensmd.collectives.name import DEVICES, NAME
from opensmd.collectives.recording.begin import (
    record_all_groups,
    record_devices,
    record_smddp,
)
from opensmd.collectives.sealed import seal_objects_of_torch
from opensmd.collectives.stores._torch_internals import (
    let_scripts_choose_the_rendezvous,
    listen_where_asked,
    remember_store,
    rendezvous_address,
)
from opensmd.collectives.topology import GroupPlan, exchange_identities, make_plan, own_identity, share_arena
from opensmd.environment.ignored import warn_of_ignored
from opensmd.environment.settings import Settings
from opensmd.native.availability import core_or_reason
from opensmd.said_once import warn_once

__all__ = ["NAME", "create", "register"]

# As many as one arena takes; larger groups of one host are served by Gloo.
MOST_IN_ARENA = 64
LEAST_HEAP = 1 << 20  # bytes


@cache
def register() -> None:
    """Make "smddp" a backend of torch.distributed. Calling it again changes nothing."""
    # DDP asks a backend for the memory of its buckets only where this is "0"; a user's own value stands.
    os.environ.setdefault("DDP_DISABLE_COMM_MEM", "0")
    warn_of_ignored(os.environ)
    setattr(dist.Backend, NAME.upper(), NAME)  # torch looks it up, and that would come here once more
    dist.Backend.register_backend(NAME, create, extended_api=True, devices=list(DEVICES))
    seal_objects_of_torch()
    record_all_groups()
    _torch_internals.open_to_smddp(NAME)
    listen_where_asked()
    # smdrun says where its store is; under torchrun the script has hardly changed it before its imports
    at = os.environ.get("SMDRUN_STORE") or rendezvous_address()
    let_scripts_choose_the_rendezvous(at)


@dataclass(frozen=True)
class Membership:
    """One process's place in one group."""

    store: Store
    rank: int
    ranks: tuple[int, ...]  # global, by group rank
    timeout: timedelta
    name: str

    @property
    def size(self) -> int:
        return len(self.ranks)


def create(torch_options: Any, own_options: Any = None) -> Any:
    """What torch calls for every group whose backend is "smddp"."""
    size, rank = torch_options.group_size, torch_options.group_rank
    if not 0 <= rank < size:
        raise ValueError(
            f"smddp: rank {rank} cannot be one of {size}: ranks go from 0 to {size - 1}. RANK and WORLD_SIZE "
            "do not fit, or rank and world_size of init_process_group"
        )
    ranks = torch_options.global_ranks_in_group or range(size)
    timeout = own_options._timeout if own_options is not None else torch_options.timeout
    place = Membership(torch_options.store, rank, tuple(ranks), timeout, torch_options.group_id)
    return _make_backend(place)


def _make_backend(place: Membership) -> Any:
    settings = Settings.from_environment()
    native, reason = core_or_reason(settings)
    exchange = Exchange(place.store, place.rank, place.ranks, timeout=place.timeout, group=place.name)
    plan = make_plan(exchange_identities(exchange, own_identity(settings, native=reason)))
    exchange.within("the store's name", lambda: remember_store(place.store))
    if native is None or plan.without_core:
        if place.rank == 0:
            _warn_without_core(plan, place.ranks, settings)
        gloo = _gloo(place, exchange, plan)
        exchange.meet("connected")
        return gloo
    options = native.Options(place.timeout, settings.compression or "none")
    common = {
        "names": _names(place, plan),
        "rank": place.rank,
        "size": place.size,
        "options": options,
        "device_backend": lambda: _nccl(place, exchange),
        "meet_on_device": lambda: exchange.meet_later("the first collective of CUDA tensors"),
        "split": lambda store, rank, ranks, given: _split(place, store, rank, ranks, given),
    }
    fd = _share_arena(native, settings, place, exchange, plan) if _may_share(plan) else None
    try:
        if fd is not None and plan.one_host:
            return _recorded(place, native.make_shared_backend(fd=fd, **common))
        gloo = _gloo(place, exchange, plan)
        name = f"group {place.name!r}" if settings.network_report else ""
        hosts = plan.local_groups if fd is not None else [(rank,) for rank in range(place.size)]
        # A script may end as soon as its group is made, and others connect to its process until theirs is.
        chosen = agree_on_thresholds(gloo, exchange, place.rank, hosts, settings.network, report=name)
        failures = PrefixStore(f"opensmd/failures/{exchange.generation}", place.store)
        made = native.make_gloo_backend(
            gloo=gloo,
            connections=_torch_internals.connections_of(gloo),
            store=failures,
            fd=fd,
            hosts=hosts,
            **asdict(chosen),
            **common,
        )
        return _recorded(place, made)
    finally:
        if fd is not None:
            os.close(fd)  # nobody opens the creator's descriptor any more: all have said that they did


def _recorded(place: Membership, backend: Any) -> Any:
    record_smddp(backend, place.name, place.ranks[place.rank], place.ranks)
    return backend


def _names(place: Membership, plan: GroupPlan) -> list[str]:
    """What messages call the members: by global rank, with the host where there are several."""
    if plan.one_host:
        return [f"rank {rank}" for rank in place.ranks]
    return [f"rank {rank} on {host}" for rank, host in zip(place.ranks, plan.hosts, strict=True)]


def _may_share(plan: GroupPlan) -> bool:
    """Whether shared memory can serve all ranks, or those of each host."""
    return (plan.one_host or plan.shares_hosts) and max(map(len, plan.local_groups)) <= MOST_IN_ARENA


def _share_arena(
    native: ModuleType, settings: Settings, place: Membership, exchange: Exchange, plan: GroupPlan
) -> int | None:
    """The descriptor of this host's arena; None, with a warning, where a rank could not have it."""
    local = plan.local_group_of(place.rank)
    shape = native.ArenaShape()
    shape.size = len(local)
    heap = settings.heap_bytes
    shape.heap_bytes = _usual_heap(native, len(local)) if heap is None else heap
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


def _usual_heap(native: ModuleType, size: int) -> int:
    """The core's own choice, or less where this process is not allowed so much (``ulimit -v``, ``-f``)."""
    used = {resource.RLIMIT_AS: psutil.Process().memory_info().vms, resource.RLIMIT_FSIZE: 0}
    softs = {which: resource.getrlimit(which)[0] for which in used}
    left = [soft - used[which] for which, soft in softs.items() if soft != resource.RLIM_INFINITY]
    return min(
        [int(native.default_heap_bytes(size)), *(max(each // (4 * size), LEAST_HEAP) for each in left)]
    )


def _split(place: Membership, store: Store, rank: int, ranks: Sequence[int], options: Any) -> Any:
    inside = tuple(place.ranks[other] for other in ranks)
    # All parts of a split get the same store.
    own_store = PrefixStore(f"{options.group_name}/", store)
    return _make_backend(Membership(own_store, rank, inside, options._timeout, options.group_name))


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


def _gloo(place: Membership, exchange: Exchange, plan: GroupPlan) -> Any:
    exchange.all_gather("before Gloo", "")  # names who is missing, where Gloo would name one of its keys
    store = PrefixStore(f"opensmd/gloo/{exchange.generation}", place.store)
    connect = partial(
        _torch_internals.gloo_group,
        store,
        place.rank,
        place.size,
        timeout=place.timeout,
        one_network=plan.one_network,
    )
    return _connected(place, exchange, plan, connect)


def _connected(place: Membership, exchange: Exchange, plan: GroupPlan, connect: Callable[[], Any]) -> Any:
    """What Gloo's ``connect`` returns.

    Raises:
        DistBackendError: it cannot, with the remedy where a rank listens on its loopback for other hosts.
    """
    hidden = [place.ranks[member] for member in plan.hidden]
    hosts = ", ".join(sorted({plan.hosts[member] for member in plan.hidden}))
    remedy = (
        f"Gloo listens on the loopback on ranks {', '.join(map(str, hidden))} ({hosts}), where other hosts "
        "cannot reach it: that is what the names of these hosts resolve to, or GLOO_SOCKET_IFNAME says. Set "
        "GLOO_SOCKET_IFNAME on all ranks to the network interface that joins the hosts, for example eth0; "
        "`ip -brief address` shows which there are."
    )
    if plan.cut_off:
        raise dist.DistBackendError(f"making group {place.name!r} on rank {exchange.rank}: {remedy}")
    try:
        return exchange.within("connecting Gloo", connect)
    except dist.DistBackendError as error:
        raise dist.DistBackendError(f"{error} {remedy}" if hidden else str(error)) from error


def _nccl(place: Membership, exchange: Exchange) -> Any:
    if not (torch.cuda.is_available() and dist.is_nccl_available()):
        raise RuntimeError(
            "smddp: this group got a CUDA tensor, which only torch's NCCL can serve, and here "
            f"torch.cuda.is_available() is {torch.cuda.is_available()} and "
            f"torch.distributed.is_nccl_available() is {dist.is_nccl_available()}. Install a torch built "
            "with CUDA, or use CPU tensors."
        )
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = place.timeout
    options.global_ranks_in_group = list(place.ranks)
    options.group_name = GroupName(place.name)
    store = PrefixStore(f"opensmd/nccl/{exchange.generation}", place.store)
    made = dist.ProcessGroupNCCL(store, place.rank, place.size, options)
    made._set_sequence_number_for_group()
    record_devices(made, place.name, place.ranks[place.rank], place.ranks)
    return made
