"""The four ``*_multigpu`` functions: each process takes part with several tensors, one per device.

Each is the single-tensor collective plus work inside the process, so the same code serves GPUs and, on
machines without them, lists of CPU tensors, with every backend. All processes give lists of equal length.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from opensmd.legacy import api
from opensmd.legacy.capability import check_tensors
from opensmd.legacy.groups import Group, group
from opensmd.legacy.names import checked_operation, reduce_op

__all__ = ["all_gather_multigpu", "all_reduce_multigpu", "broadcast_multigpu", "reduce_multigpu"]

_IN_PLACE: dict[reduce_op, Callable[..., torch.Tensor]] = {
    reduce_op.SUM: torch.Tensor.add_,
    reduce_op.PRODUCT: torch.Tensor.mul_,
    reduce_op.MAX: lambda mine, other: torch.maximum(mine, other, out=mine),
    reduce_op.MIN: lambda mine, other: torch.minimum(mine, other, out=mine),
}


@torch.no_grad()
def broadcast_multigpu(tensor_list: Sequence[torch.Tensor], src: int, group: Group = group.WORLD) -> None:
    """Copy ``tensor_list[0]`` of rank ``src`` to all other tensors of all members, its own others included.

    Args:
        tensor_list: tensors of one size and dtype, on different GPUs.
        src: rank of the source.
        group: default ``group.WORLD``.
    """
    _check_inputs("broadcast_multigpu", tensor_list)
    if _is_member(group):
        api.broadcast(tensor_list[0], src, group)
        _copy_to_others(tensor_list[0], tensor_list)


@torch.no_grad()
def all_reduce_multigpu(
    tensor_list: Sequence[torch.Tensor], op: reduce_op = reduce_op.SUM, group: Group = group.WORLD
) -> None:
    """Reduce over all tensors of all members; every one of them gets the result.

    With 2 processes of 8 tensors that are 1, all 16 become 16.
    """
    _check_inputs("all_reduce_multigpu", tensor_list)
    if _is_member(group):
        total = _reduced(tensor_list, op)
        api.all_reduce(total, op, group)
        tensor_list[0].copy_(total)
        _copy_to_others(tensor_list[0], tensor_list)


@torch.no_grad()
def reduce_multigpu(
    tensor_list: Sequence[torch.Tensor], dst: int, op: reduce_op = reduce_op.SUM, group: Group = group.WORLD
) -> None:
    """Reduce over all tensors of all members; only ``tensor_list[0]`` of rank ``dst`` gets the result."""
    _check_inputs("reduce_multigpu", tensor_list)
    if _is_member(group):
        total = _reduced(tensor_list, op)
        api.reduce(total, dst, op, group)
        if api.get_rank() == dst:
            tensor_list[0].copy_(total)


@torch.no_grad()
def all_gather_multigpu(
    output_tensor_lists: Sequence[Sequence[torch.Tensor]],
    input_tensor_list: Sequence[torch.Tensor],
    group: Group = group.WORLD,
) -> None:
    """Copy all tensors of all members to each list of outputs.

    Args:
        output_tensor_lists: one list for each input tensor, on its device, of ``members * len(input)``
            tensors. ``output_tensor_lists[i][k * len(input) + j]`` gets tensor ``j`` of the member at
            position ``k``.
        input_tensor_list: this process's tensors, of one size and dtype.
        group: default ``group.WORLD``.

    Raises:
        RuntimeError: the outputs do not have this shape.
    """
    _check_inputs("all_gather_multigpu", input_tensor_list)
    if not _is_member(group):
        return
    count = len(input_tensor_list)
    first = input_tensor_list[0]
    own = torch.stack([tensor.detach().to(first.device) for tensor in input_tensor_list])
    members = len(api.current_session().resolve(group).ranks)
    if [len(outputs) for outputs in output_tensor_lists] != [members * count] * count:
        raise RuntimeError(
            "all_gather_multigpu: output_tensor_lists has lists of "
            f"{[len(inner) for inner in output_tensor_lists]} tensors; expected {count} list(s) of "
            f"{members * count}: {members} processes with {count} tensors each"
        )
    for outputs in output_tensor_lists:
        _check_list("all_gather_multigpu", [first, *outputs])
    gathered = [torch.empty_like(own) for _ in range(members)]
    api.all_gather(gathered, own, group)
    parts = [theirs[index] for theirs in gathered for index in range(count)]
    for outputs in output_tensor_lists:
        for output, part in zip(outputs, parts, strict=True):
            output.copy_(part.view(output.shape))


def _is_member(group: Group) -> bool:
    return api.current_session().resolve(group).channel is not None


def _reduced(tensors: Sequence[torch.Tensor], op: reduce_op) -> torch.Tensor:
    """A new tensor on the first one's device: all reduced."""
    combine = _IN_PLACE[checked_operation(op)]
    total = tensors[0].detach().clone()
    for other in tensors[1:]:
        combine(total, other.detach().to(total.device))
    return total


def _copy_to_others(source: torch.Tensor, tensors: Sequence[torch.Tensor]) -> None:
    for other in tensors[1:]:
        other.copy_(source)


def _check_list(function: str, tensors: Sequence[torch.Tensor]) -> None:
    check_tensors(api.current_session().backend, function, (), tensors)
    if not tensors:
        raise RuntimeError(f"{function}: the list of tensors is empty; give one for each device")
    first = tensors[0]
    for index, tensor in enumerate(tensors):
        if tensor.numel() != first.numel() or tensor.dtype != first.dtype:
            raise RuntimeError(
                f"{function}: tensor sizes do not match: tensor {index} has {tensor.numel()} elements of "
                f"{tensor.dtype}, tensor 0 has {first.numel()} of {first.dtype}"
            )


def _check_inputs(function: str, tensors: Sequence[torch.Tensor]) -> None:
    _check_list(function, tensors)
    devices = [tensor.device for tensor in tensors if tensor.is_cuda]
    if len(set(devices)) != len(devices):
        raise RuntimeError(f"{function}: two tensors are on one GPU ({devices}); put each on its own")
