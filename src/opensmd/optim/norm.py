"""The norm of all gradients together, also where each rank has only some of them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from opensmd.upcast import upcast

__all__ = ["global_norm"]


def global_norm(
    grads: Sequence[Tensor],
    *,
    group: dist.ProcessGroup | None = None,
    groups: Sequence[dist.ProcessGroup] = (),
) -> Tensor:
    """The 2-norm of ``grads`` and of what the other ranks of ``group`` give; 0-dimensional, float64.

    Half-precision gradients are widened first, and squares are added in float64, so that the result hardly
    depends on how parameters are spread over ranks.

    Args:
        grads: of any shapes; may be empty on some ranks.
        group: called on all of its ranks; None for the given gradients alone.
        groups: the same for several, each of which adds up what the one before it has.
    """
    if group is not None:
        groups = [group, *groups]
    square = torch.zeros((), dtype=torch.float64, device=grads[0].device if grads else "cpu")
    if grads:
        norms = torch._foreach_norm([upcast(grad) for grad in grads])
        square = torch.stack([norm.to(square) for norm in norms]).square().sum()
    for one in groups:
        if dist.get_world_size(one) > 1:
            shared = square.to(_meeting_place(one))
            dist.all_reduce(shared, group=one)
            square = shared.to(square.device)
    return square.sqrt()


def _meeting_place(group: dist.ProcessGroup) -> str:
    """The same device on all ranks of a group, whether or not they have gradients, and on whichever device.

    smddp takes both kinds of tensors, but not from some ranks one and from others the other.
    """
    return "cuda" if dist.get_backend(group) == "nccl" else "cpu"
