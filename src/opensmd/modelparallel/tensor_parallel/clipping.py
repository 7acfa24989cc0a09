"""Making torch's ``clip_grad_norm_`` correct if tensor-parallel ranks have slices of parameters.

It takes the norm of what it sees: this rank's slices. Each rank would scale by a different norm, and common
parameters would diverge. So norms of slices are summed over the ranks that share them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

import torch.distributed as dist
from torch import Tensor, nn

from opensmd.modelparallel.redirection._torch_internals import replaced_total_norm
from opensmd.modelparallel.tensor_parallel.tensor_group import tensor_process_group
from opensmd.upcast import upcast_dtype

__all__ = ["clip_by_whole_tensors"]


def clip_by_whole_tensors(slices: Callable[[], Iterable[nn.Parameter]]) -> Callable[[], None]:
    """Make ``torch.nn.utils.clip_grad_norm_`` use the norm of whole tensors from now on.

    Args:
        slices: the parameters of which this rank has a slice.

    Returns:
        A function that undoes this.
    """

    def total_norm(
        plain: Callable[..., Tensor],
        gradients: Tensor | Iterable[Tensor],
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
        foreach: bool | None = None,
    ) -> Tensor:
        tensors = [gradients] if isinstance(gradients, Tensor) else list(gradients)
        own = {id(parameter.grad) for parameter in slices()}
        split = [gradient for gradient in tensors if id(gradient) in own]
        if not split:
            return plain(tensors, norm_type, error_if_nonfinite, foreach)
        common = [gradient for gradient in tensors if id(gradient) not in own]
        shared = _over_ranks(plain(split, norm_type, False, foreach), float(norm_type))
        parts = [shared, plain(common, norm_type, False, foreach).to(shared.device)] if common else [shared]
        return plain(parts, norm_type, error_if_nonfinite)

    return replaced_total_norm(total_norm)


def _over_ranks(norm: Tensor, order: float) -> Tensor:
    """Combine each rank's norm of this order into that of all ranks."""
    group = tensor_process_group()
    if math.isinf(order):
        operation = dist.ReduceOp.MAX if order > 0 else dist.ReduceOp.MIN
        dist.all_reduce(norm, operation, group=group)
        return norm
    power = norm.double().pow(order)
    dist.all_reduce(power, group=group)
    root: Tensor = power.pow(1 / order).to(upcast_dtype(norm.dtype))
    return root
