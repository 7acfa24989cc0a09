"""What scripts ask about their position: ranks, sizes and groups, such as ``smp.rank()``."""

from __future__ import annotations

import torch.distributed as dist

from opensmd.modelparallel.ranks.grid import CommGroup
from opensmd.modelparallel.state import state

__all__ = [
    "rank",
    "size",
    "local_rank",
    "local_size",
    "mp_rank",
    "mp_size",
    "dp_rank",
    "dp_size",
    "pp_rank",
    "pp_size",
    "tp_rank",
    "tp_size",
    "rdp_rank",
    "rdp_size",
    "get_mp_group",
    "get_dp_group",
    "get_pp_group",
    "get_tp_group",
    "get_rdp_group",
    "get_world_process_group",
    "get_mp_process_group",
    "get_dp_process_group",
    "get_pp_process_group",
    "get_tp_process_group",
    "get_rdp_process_group",
    "is_initialized",
    "rank_message",
]


def is_initialized() -> bool:
    """Whether ``smp.init`` has been called."""
    return state.initialized


def rank() -> int:
    """The number of this process among all."""
    return state.require("smp.rank").rank


def size() -> int:
    """The number of processes."""
    return state.require("smp.size").grid.size


def local_rank() -> int:
    """The number of this process among those of its host."""
    return state.require("smp.local_rank").locality.rank


def local_size() -> int:
    """The number of processes on this host."""
    return state.require("smp.local_size").locality.size


def mp_rank() -> int:
    """The number of this process among those that hold one replica of the model."""
    return _rank(CommGroup.MP_GROUP, "smp.mp_rank")


def mp_size() -> int:
    """The number of processes that hold one replica of the model."""
    return _size(CommGroup.MP_GROUP, "smp.mp_size")


def dp_rank() -> int:
    """The number of this process among those with the same partition; use it to shard data and to decide who
    saves.
    """
    return _rank(CommGroup.DP_GROUP, "smp.dp_rank")


def dp_size() -> int:
    """The number of processes with the same partition."""
    return _size(CommGroup.DP_GROUP, "smp.dp_size")


def pp_rank() -> int:
    """The partition that this process holds."""
    return _rank(CommGroup.PP_GROUP, "smp.pp_rank")


def pp_size() -> int:
    """The number of partitions."""
    return _size(CommGroup.PP_GROUP, "smp.pp_size")


def tp_rank() -> int:
    """The number of this process among those that share each tensor."""
    return _rank(CommGroup.TP_GROUP, "smp.tp_rank")


def tp_size() -> int:
    """The number of processes that share each tensor."""
    return _size(CommGroup.TP_GROUP, "smp.tp_size")


def rdp_rank() -> int:
    """The number of this process among those that hold exactly the same parameters."""
    return _rank(CommGroup.RDP_GROUP, "smp.rdp_rank")


def rdp_size() -> int:
    """The number of processes that hold exactly the same parameters."""
    return _size(CommGroup.RDP_GROUP, "smp.rdp_size")


def get_mp_group() -> list[int]:
    """Global ranks of this process's model-parallel group."""
    return _members(CommGroup.MP_GROUP, "smp.get_mp_group")


def get_dp_group() -> list[int]:
    """Global ranks of this process's data-parallel group."""
    return _members(CommGroup.DP_GROUP, "smp.get_dp_group")


def get_pp_group() -> list[int]:
    """Global ranks of this process's pipeline group."""
    return _members(CommGroup.PP_GROUP, "smp.get_pp_group")


def get_tp_group() -> list[int]:
    """Global ranks of this process's tensor-parallel group."""
    return _members(CommGroup.TP_GROUP, "smp.get_tp_group")


def get_rdp_group() -> list[int]:
    """Global ranks of this process's reduced-data-parallel group."""
    return _members(CommGroup.RDP_GROUP, "smp.get_rdp_group")


def get_world_process_group() -> dist.ProcessGroup:
    """All processes, for use with torch.distributed."""
    return _process_group(CommGroup.WORLD, "smp.get_world_process_group")


def get_mp_process_group() -> dist.ProcessGroup:
    """The processes of this model replica, for use with torch.distributed."""
    return _process_group(CommGroup.MP_GROUP, "smp.get_mp_process_group")


def get_dp_process_group() -> dist.ProcessGroup:
    """The replicas of this partition, for use with torch.distributed."""
    return _process_group(CommGroup.DP_GROUP, "smp.get_dp_process_group")


def get_pp_process_group() -> dist.ProcessGroup:
    """This process's pipeline group, for use with torch.distributed."""
    return _process_group(CommGroup.PP_GROUP, "smp.get_pp_process_group")


def get_tp_process_group() -> dist.ProcessGroup:
    """This process's tensor-parallel group, for use with torch.distributed."""
    return _process_group(CommGroup.TP_GROUP, "smp.get_tp_process_group")


def get_rdp_process_group() -> dist.ProcessGroup:
    """This process's reduced-data-parallel group, for use with torch.distributed."""
    return _process_group(CommGroup.RDP_GROUP, "smp.get_rdp_process_group")


def _rank(kind: CommGroup, call: str) -> int:
    return state.require(call).groups.rank_in(kind)


def _size(kind: CommGroup, call: str) -> int:
    return state.require(call).groups.size(kind)


def _members(kind: CommGroup, call: str) -> list[int]:
    return list(state.require(call).groups.members(kind))


def _process_group(kind: CommGroup, call: str) -> dist.ProcessGroup:
    return state.require(call).groups[kind]


def rank_message(message: object) -> str:
    """Prefix ``message`` with this process's global rank, for logs (``utils.rmsg``)."""
    return f"[{state.require('rmsg').rank}] {message}"
