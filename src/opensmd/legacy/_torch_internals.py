"""The private parts of torch that ``torch.distributed.deprecated`` uses.

Its groups are created directly from torch's process group classes and never registered with
``torch.distributed``, so a script may use both packages side by side, and destroy either.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
from torch._C._distributed_c10d import (
    AllgatherOptions,
    AllreduceOptions,
    BarrierOptions,
    BroadcastOptions,
    GatherOptions,
    PrefixStore,
    ProcessGroup,
    ReduceOp,
    ReduceOptions,
    ScatterOptions,
    Store,
    TCPStore,
    Work,
    _DistributedBackendOptions,
)
from torch.distributed.distributed_c10d import Backend, GroupName

from opensmd.collectives._torch_internals import gloo_group, gloo_options

__all__ = [
    "AllgatherOptions",
    "AllreduceOptions",
    "BarrierOptions",
    "BroadcastOptions",
    "GatherOptions",
    "PrefixStore",
    "ProcessGroup",
    "ReduceOp",
    "ReduceOptions",
    "ScatterOptions",
    "Store",
    "TCPStore",
    "Work",
    "after_backward",
    "private_group",
]


def private_group(
    engine: str,
    *,
    store: Store,
    name: str,
    rank: int,
    ranks: list[int],
    timeout: float,
    one_network: bool = False,
) -> ProcessGroup:
    """Create a process group that ``torch.distributed`` does not know about.

    Args:
        engine: ``gloo``, ``nccl``, or a backend registered with ``torch.distributed``.
        store: one that all members can reach.
        name: the same on all members, and unique on this store.
        rank: this process's rank in the whole job; one of ``ranks``.
        ranks: the members' ranks in the whole job; a member's rank in the group is its position.
        timeout: seconds that an operation may take.
        one_network: whether all members share a loopback.
    """
    own = PrefixStore(f"{name}/", store)
    limit = timedelta(seconds=timeout)
    group = ProcessGroup(own, ranks.index(rank), len(ranks))
    backend: Any
    if engine == "gloo":
        options = gloo_options(timeout=limit, one_network=one_network)
        backend = gloo_group(own, ranks.index(rank), len(ranks), options)
        kind, device = ProcessGroup.BackendType.GLOO, "cpu"
    elif engine == "nccl":
        from torch._C._distributed_c10d import ProcessGroupNCCL

        options = ProcessGroupNCCL.Options()
        options._timeout = limit
        options.global_ranks_in_group = ranks
        options.group_name = GroupName(name)
        backend = ProcessGroupNCCL(own, ranks.index(rank), len(ranks), options)
        kind, device = ProcessGroup.BackendType.NCCL, "cuda"
    else:
        backend = _registered(engine, own, name, ranks.index(rank), ranks, limit)
        kind, device = ProcessGroup.BackendType.CUSTOM, "cpu"
    group._set_default_backend(kind)
    group._register_backend(torch.device(device), kind, backend)
    group._set_group_name(GroupName(name))
    group._set_group_desc("torch.distributed.deprecated")
    return group


def _registered(engine: str, store: Store, name: str, rank: int, ranks: list[int], limit: timedelta) -> Any:
    """Create a backend that a package has registered with ``torch.distributed``."""
    plugin = Backend._plugins[engine.upper()]
    if not plugin.extended_api:
        return plugin.creator_fn(store, rank, len(ranks), limit)
    options = _DistributedBackendOptions()
    options.store = store
    options.group_rank = rank
    options.group_size = len(ranks)
    options.timeout = limit
    options.group_id = name
    options.global_ranks_in_group = ranks
    return plugin.creator_fn(options, None)


def after_backward(function: Callable[[], None]) -> None:
    """Call ``function`` at the end of the running backward pass."""
    torch.autograd.Variable._execution_engine.queue_callback(function)
