"""What ranks with parameters agree on when gradients are scaled: an overflow anywhere, and the scale itself.

Scripts skip ``optimizer.step()`` on a rank without parameters, so what a step exchanges stays between the
others. The loss may be computed on such a rank: when a step begins, it learns the scale from them.
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
        name: who needs it, for the error before ``smp.init``.
    """
    group = state.require(name).groups.owners
    if group is not None and dist.get_world_size(group) > 1:
        dist.all_reduce(worst, dist.ReduceOp.MAX, group=group)


def from_owners(values: Tensor) -> Tensor:
    """The ``values`` of a rank with parameters, if not all have some; called on all ranks of the replica."""
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
    """Where the tensors are; for a rank without any, the CPU."""
    return tensors[0].device if tensors else torch.device("cpu")
