"""What ranks with parameters agree on when gradients are scaled: overflows, and the scale itself.

Scripts skip ``optimizer.step()`` on a rank without parameters, so only the others communicate in it. But the
loss may be computed on such a rank, so it learns the scale when a step starts.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from opensmd.modelparallel.ranks.grid import CommGroup
from opensmd.modelparallel.state import state

__all__ = ["device_of", "from_owners", "share_among_owners", "share_over_replicas"]


def share_among_owners(worst: Tensor, *, name: str) -> None:
    """Replace ``worst`` by its maximum over the ranks with parameters of this replica.

    Args:
        worst: one element; unchanged on a rank without parameters.
        name: the caller, for the error before ``smp.init``.
    """
    group = state.require(name).groups.owners
    if group is not None and dist.get_world_size(group) > 1:
        dist.all_reduce(worst, dist.ReduceOp.MAX, group=group)


def from_owners(values: Tensor) -> Tensor:
    """Return ``values`` of a rank with parameters, unless all have some; all ranks of the replica call."""
    groups = state.groups
    if len(groups.owner_stages) == groups.size(CommGroup.PP_GROUP):
        return values
    group = groups[CommGroup.PP_GROUP]
    sent = values.to("cuda") if dist.get_backend(group) == "nccl" else values
    dist.broadcast(sent, group=group, group_src=groups.owner_stages[0])
    return sent.to(values.device)


def share_over_replicas(worst: Tensor) -> None:
    """Replace ``worst`` by its maximum over the ranks that hold the same part of the model."""
    group = state.groups[CommGroup.DP_GROUP]
    if state.cfg.ddp and dist.get_world_size(group) > 1:
        dist.all_reduce(worst, dist.ReduceOp.MAX, group=group)


def device_of(tensors: Sequence[Tensor]) -> torch.device:
    """Return the device of the tensors; the CPU if there are none."""
    return tensors[0].device if tensors else torch.device("cpu")
