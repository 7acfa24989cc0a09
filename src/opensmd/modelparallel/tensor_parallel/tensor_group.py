"""The ranks that share this rank's tensors, as distributed modules see them."""

from __future__ import annotations

import torch.distributed as dist

from opensmd.modelparallel.ranks.grid import CommGroup
from opensmd.modelparallel.state import state

__all__ = ["batch_is_shared", "tensor_process_group", "tensor_rank", "tensor_size"]


def tensor_rank() -> int:
    """Return this rank's number among those that share its tensors."""
    return state.require("a distributed module").groups.rank_in(CommGroup.TP_GROUP)


def tensor_size() -> int:
    """Return the number of ranks that share each tensor."""
    return state.require("a distributed module").cfg.tensor_parallel_degree


def tensor_process_group() -> dist.ProcessGroup:
    """Return the process group of the tensor-parallel ranks."""
    return state.groups[CommGroup.TP_GROUP]


def batch_is_shared() -> bool:
    """Whether all of these ranks get the same batch, so there is nothing to gather."""
    return state.cfg.prescaled_batch or state.cfg.tensor_parallel_degree == 1
