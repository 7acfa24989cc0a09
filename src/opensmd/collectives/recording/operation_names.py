"""A timeline's names for operations that the core, torch's operators and NCCL name differently; pure."""

from __future__ import annotations

__all__ = ["name_of"]

# torch.distributed's names for what its operators and its NCCL call otherwise.
_NAMES = {
    "allreduce": "all_reduce",
    "allreduce_coalesced": "all_reduce_coalesced",
    "allgather": "all_gather",
    "allgather_base": "all_gather_into_tensor",
    "allgather_coalesced": "all_gather_coalesced",
    "allgather_into_tensor_coalesced": "all_gather_into_tensor_coalesced",
    "reduce_scatter_base": "reduce_scatter_tensor",
    "alltoall": "all_to_all",
    "alltoall_base": "all_to_all_single",
    "recvanysource": "recv_any_source",
}


def name_of(operation: str) -> str:
    """Return the usual name of "smddp:all_reduce", "c10d::allreduce_" or NCCL's "ALLREDUCE"."""
    short = operation.rpartition(":")[2].strip("_").lower()
    return _NAMES.get(short, short)
