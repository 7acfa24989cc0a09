"""Differentiable collectives of a tensor-parallel group.

Tensors are either *common*: equal on all ranks of the group, with equal gradients; or *partial* or *split*.
torch's differentiable collectives treat every rank's result as a separate loss and add up the gradients; here
the ranks compute one loss together::

    function        forward                      backward
    to_split        nothing                      all-reduce      common -> different uses on each rank
    from_partial    all-reduce                   nothing         partial sums -> common
    summed_in_place the same in its input's memory
    sum_for_split   all-reduce                   all-reduce      partial sums -> different uses on each rank
    gather          all-gather along an axis     own slice       split -> common
    own_slice       own slice of an axis         all-gather      common -> split
    gather_batch    all-gather along axis 0      own slice * T   each rank's batch -> common
    scatter_batch   own slice of axis 0          all-gather / T  common -> each rank's batch

The last two cross the border of the shared region: inside, the loss is the mean of the T ranks' losses, so
its parameters' gradients are those of a data-parallel mean.

In the dry run before partitioning, rank 0 is alone; then only shapes are produced.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from opensmd.modelparallel.dry_run.capture import is_tracing
from opensmd.modelparallel.ranks.exchange import exchange
from opensmd.modelparallel.ranks.meeting import meet
from opensmd.modelparallel.ranks.shards import bounds
from opensmd.modelparallel.runtime.stable_hash import stable_hash
from opensmd.modelparallel.tensor_parallel.tensor_group import (
    tensor_process_group,
    tensor_rank,
    tensor_size,
)

__all__ = [
    "all_gathered",
    "all_reduced",
    "from_partial",
    "gather",
    "gather_batch",
    "own_part",
    "own_slice",
    "scatter_batch",
    "sum_for_split",
    "summed_in_place",
    "to_split",
]


def to_split(tensor: Tensor) -> Tensor:
    """Prepare a common tensor for uses that differ between ranks; its gradient is the sum of theirs."""
    if tensor_size() == 1 or not tensor.requires_grad:
        return tensor
    result: Tensor = _ToSplit.apply(tensor)  # type: ignore[no-untyped-call]
    return result


def from_partial(tensor: Tensor) -> Tensor:
    """Return the sum of the ranks' tensors."""
    if tensor_size() == 1:
        return tensor
    result: Tensor = _FromPartial.apply(tensor)  # type: ignore[no-untyped-call]
    return result


def summed_in_place(tensor: Tensor) -> Tensor:
    """Like :func:`from_partial`, in place, for a tensor that neither callers nor backwards need."""
    if tensor_size() == 1:
        return tensor
    result: Tensor = _SummedInPlace.apply(tensor)  # type: ignore[no-untyped-call]
    return result


def sum_for_split(tensor: Tensor) -> Tensor:
    """Return the sum of the ranks' tensors, for uses that differ between ranks."""
    return to_split(from_partial(tensor))


def gather(tensor: Tensor, axis: int, size: int) -> Tensor:
    """Gather the ranks' slices of ``size`` entries along ``axis``."""
    if tensor_size() == 1:
        return tensor
    result: Tensor = _Gather.apply(tensor, axis % tensor.dim(), size)  # type: ignore[no-untyped-call]
    return result


def own_slice(tensor: Tensor, axis: int) -> Tensor:
    """Return this rank's slice of a common tensor."""
    if tensor_size() == 1:
        return tensor
    result: Tensor = _OwnSlice.apply(tensor, axis % tensor.dim())  # type: ignore[no-untyped-call]
    return result


def gather_batch(tensor: Tensor, module: str = "") -> Tensor:
    """Concatenate the batches of all ranks.

    Args:
        tensor: this rank's.
        module: the name of the module that gathers.

    Raises:
        ValueError: on all ranks, if they are in different modules, or their batches have different shapes.
    """
    _require_same_call(tensor, module)
    result: Tensor = _GatherBatch.apply(tensor)  # type: ignore[no-untyped-call]
    return result


def scatter_batch(tensor: Tensor) -> Tensor:
    """Return this rank's part of what was computed from all batches."""
    result: Tensor = _ScatterBatch.apply(tensor)  # type: ignore[no-untyped-call]
    return result


def all_reduced(tensor: Tensor, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> Tensor:
    """Return a new tensor with the reduction over the group, without a graph."""
    return _reduced(tensor.detach().clone(memory_format=torch.contiguous_format), op)


def all_gathered(tensor: Tensor, axis: int, size: int) -> Tensor:
    """Gather ``size`` entries along ``axis``, without a graph; slices may have unequal sizes."""
    parts = tensor_size()
    if is_tracing():
        shape = list(tensor.shape)
        shape[axis] = size
        return tensor.new_zeros(shape)
    longest = bounds(size, parts, 0)[1]
    own = tensor.detach()
    if own.shape[axis] < longest:
        missing = list(own.shape)
        missing[axis] = longest - own.shape[axis]
        own = torch.cat([own, own.new_zeros(missing)], axis)
    own = own.contiguous()
    whole = own.new_empty((parts * own.shape[0], *own.shape[1:]) if own.dim() else (parts,))
    dist.all_gather_single(whole, own, group=tensor_process_group())
    if axis:
        whole = torch.cat(whole.chunk(parts), axis)
    return whole.narrow(axis, 0, size)


def _require_same_call(tensor: Tensor, module: str) -> None:
    """Batches of as many elements would mix, whatever they are; reading from a GPU would wait for it."""
    if is_tracing() or not tensor.is_cpu:
        return
    group = tensor_process_group()
    form = _form(tensor.shape, tensor.dtype, module)
    if len({*meet("a distributed module", group, tensor.device, (form, 0, 0, 0))}) == 1:
        return
    calls = exchange((list(tensor.shape), tensor.dtype, module), group)
    modules = [name for _, _, name in calls]
    if len(set(modules)) > 1:
        raise ValueError(
            "the ranks of a tensor-parallel group are in different distributed modules: "
            f"{', '.join(modules)}. Without prescaled_batch they compute each one together, so all must go "
            "the same way through the model: decide by what they have in common (random numbers in "
            "smp.random.common()), or use prescaled_batch=True with the same batch on all"
        )
    shapes = [(shape, dtype) for shape, dtype, _ in calls]
    raise ValueError(
        "the ranks of a tensor-parallel group gave a distributed module batches of different shapes: "
        f"{', '.join(f'{shape} ({dtype})' for shape, dtype in shapes)}. Without prescaled_batch it computes "
        "them together: pad all to the same length, or use prescaled_batch=True with the same batch on all"
    )


@functools.lru_cache(maxsize=256)
def _form(shape: torch.Size, dtype: torch.dtype, module: str) -> int:
    return stable_hash((shape, dtype, module), 63)


def _reduced(own: Tensor, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> Tensor:
    if not is_tracing():
        dist.all_reduce(own, op, group=tensor_process_group())
    return own


def own_part(tensor: Tensor, axis: int) -> Tensor:
    """Return this rank's slice, as a view."""
    start, stop = bounds(tensor.shape[axis], tensor_size(), tensor_rank())
    return tensor.narrow(axis, start, stop - start)


class _ToSplit(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return all_reduced(gradients[0])


class _FromPartial(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        return all_reduced(tensor)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0]


class _SummedInPlace(_FromPartial):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        return _reduced(tensor.detach().contiguous())


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, axis: int, size: int) -> Tensor:
        ctx.axis = axis
        return all_gathered(tensor, axis, size)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        return own_part(gradients[0], ctx.axis), None, None


class _OwnSlice(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, axis: int) -> Tensor:
        ctx.axis, ctx.size = axis, tensor.shape[axis]
        return own_part(tensor, axis)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return all_gathered(gradients[0], ctx.axis, ctx.size), None


class _GatherBatch(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        return all_gathered(tensor, 0, tensor.shape[0] * tensor_size())

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return own_part(gradients[0], 0) * tensor_size()


class _ScatterBatch(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        return own_part(tensor, 0).clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        own = gradients[0]
        return all_gathered(own, 0, own.shape[0] * tensor_size()) / tensor_size()
