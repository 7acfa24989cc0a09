"""torch's own backends, for what the core does not serve: Gloo between hosts, NCCL for CUDA."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore
from torch.distributed.distributed_c10d import GroupName

from opensmd.collectives import _torch_internals
from opensmd.collectives.exchange import Exchange
from opensmd.collectives.making.membership import Membership
from opensmd.collectives.recording.begin import record_devices
from opensmd.collectives.stores.deadlines import call_within
from opensmd.collectives.topology import GroupPlan
from opensmd.first_line import first_line

__all__ = ["gloo", "nccl"]


def gloo(place: Membership, exchange: Exchange, plan: GroupPlan) -> Any:
    """Return torch's Gloo, connected.

    Raises:
        DistBackendError: as in :meth:`Exchange.all_gather`, or the members cannot reach each other.
    """
    options, failure = _options(place, exchange, plan)
    # This also names who is missing, where Gloo would name one of its keys.
    answers = exchange.all_gather("before Gloo", json.dumps([failure, _named_interfaces()]))
    obstacle = _obstacle(place.ranks, [tuple(json.loads(text)) for text in answers])
    if obstacle:
        exchange.close("no Gloo")
        raise dist.DistBackendError(f"making group {place.name!r}: {obstacle}")
    store = PrefixStore(f"opensmd/gloo/{exchange.generation}", place.store)
    connect = partial(_torch_internals.gloo_group, store, place.rank, place.size, options)
    return _connected(place, exchange, plan, connect)


def _options(place: Membership, exchange: Exchange, plan: GroupPlan) -> tuple[Any, str]:
    """How Gloo connects, or why this rank cannot listen, for all to hear: they would wait for it."""
    make = partial(_torch_internals.gloo_options, timeout=place.timeout, one_network=plan.one_network)
    try:
        return call_within(place.timeout.total_seconds(), make), ""
    except (RuntimeError, TimeoutError) as error:
        interfaces = _named_interfaces()
        where = f", with GLOO_SOCKET_IFNAME={interfaces!r} there" if interfaces else ""
        return None, f"rank {exchange.rank} cannot listen for the others of Gloo{where}: {first_line(error)}"


def _named_interfaces() -> str:
    return os.environ.get("GLOO_SOCKET_IFNAME", "")


def _obstacle(ranks: Sequence[int], answers: Sequence[tuple[str, str]]) -> str:
    """Return why Gloo cannot connect, if so; each rank has said why it cannot, and the interfaces it uses.

    Ranks with other numbers of interfaces would look for each other's messages on other connections.
    """
    for failure, _ in answers:
        if failure:
            return failure
    (_, first), counts = answers[0], [len(interfaces.split(",")) for _, interfaces in answers]
    for rank, (_, interfaces), count in zip(ranks, answers, counts, strict=True):
        if count != counts[0]:
            return (
                f"GLOO_SOCKET_IFNAME names another number of network interfaces on rank {rank} "
                f"({interfaces!r}) than on rank {ranks[0]} ({first!r}). Give it as many on all ranks, in the "
                "same order."
            )
    return ""


def _connected(place: Membership, exchange: Exchange, plan: GroupPlan, connect: Callable[[], Any]) -> Any:
    """Return the result of Gloo's ``connect``.

    Raises:
        DistBackendError: it fails; with a remedy if a rank listens on its loopback for other hosts.
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


def nccl(place: Membership, exchange: Exchange) -> Any:
    """Return torch's NCCL.

    Raises:
        RuntimeError: this machine or this torch has none.
    """
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
    group = dist.ProcessGroupNCCL(store, place.rank, place.size, options)
    group._set_sequence_number_for_group()
    record_devices(group, place.name, place.global_rank, place.ranks)
    return group
