"""The norm of all gradients together, even where each rank has only some of them."""

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
    """Return the 2-norm of ``grads`` on all ranks of ``group``, as a 0-dimensional float64 tensor.

    Half-precision gradients are widened first and squares added in float64, so the result hardly depends on
    how parameters are spread over ranks.

    Args:
        grads: of any shapes; may be empty on some ranks.
        group: all of its ranks must call; None for the given gradients alone.
        groups: further groups, each of which adds up the results of the one before.
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
    """Return a device that all ranks of ``group`` agree on, wherever their gradients are, if they have any.

    smddp takes CPU and CUDA tensors, but from all ranks the same.
    """
    return "cuda" if dist.get_backend(group) == "nccl" else "cpu"
