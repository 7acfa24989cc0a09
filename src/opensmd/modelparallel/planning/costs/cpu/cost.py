"""The time of one operation on one CPU core, from shapes and the table of rates."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from opensmd.modelparallel.planning.costs.cpu.convolutions import convolution_seconds
from opensmd.modelparallel.planning.costs.cpu.kinds import Counted, counted
from opensmd.modelparallel.planning.costs.cpu.products import attention_seconds, product_seconds
from opensmd.modelparallel.planning.costs.cpu.rates import MEMORY, RATES, VIEW
from opensmd.modelparallel.planning.costs.cpu.sizes import size_of

__all__ = ["operation_seconds"]

_aten = torch.ops.aten
# time of a gradient as a share of the forward: for elementwise products, and for anything else
BACKWARD_OF_PRODUCT = 1.5
BACKWARD_OF_ARITHMETIC = 1.5
_SUMS = {_aten.add, _aten.add_, _aten.sub, _aten.sub_}
_ATTENTION = {_aten._scaled_dot_product_flash_attention_for_cpu}


def operation_seconds(
    packet: torch._ops.OpOverloadPacket,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    tensors: Sequence[Tensor],
    result: Tensor,
    *,
    flops: float,
    needs_gradient: bool,
) -> tuple[float, float]:
    """Return forward and backward seconds; the latter are 0 without a gradient.

    Args:
        packet: the operation.
        args, kwargs: its arguments.
        tensors: the tensors among them.
        result: its first result.
        flops: those of matrix products and what consists of them; 0 for others.
        needs_gradient: whether any of the tensors does.
    """
    forward, backward = _seconds(packet, args, kwargs, tensors, result, flops, needs_gradient)
    return forward, backward if needs_gradient else 0.0


def _seconds(
    packet: torch._ops.OpOverloadPacket,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    tensors: Sequence[Tensor],
    result: Tensor,
    flops: float,
    needs_gradient: bool,
) -> tuple[float, float]:
    if packet is _aten.convolution:
        return convolution_seconds(args, result, needs_gradient)
    if packet in _ATTENTION:
        return attention_seconds(flops)
    if flops:
        factors = [tensor for tensor in tensors if tensor.dim() > 1]
        wanting = sum(tensor.requires_grad for tensor in factors)
        return product_seconds(flops, factors, max(1, wanting))
    return _of_elements(packet, counted(packet, args, kwargs, tensors, result), tensors, result)


def _of_elements(
    packet: torch._ops.OpOverloadPacket, count: Counted, tensors: Sequence[Tensor], result: Tensor
) -> tuple[float, float]:
    """Return the table's time: the longer of elements and memory, plus rows and starts."""
    rate = RATES[count.kind]
    wide = 1e-9 * max(1.0, result.element_size() / 4)
    moved = MEMORY.seconds(float(sum(map(size_of, tensors)) + size_of(result)))
    forward = max(rate.forward * wide * count.elements, moved if count.reads_all else 0.0)
    backward = max(rate.backward * wide * count.elements, _backward_memory(packet, moved, tensors, count))
    rows = rate.row * 1e-9 * count.rows
    if count.passes_on:
        return forward + rate.start * 1e-6, VIEW.backward_start * 1e-6 * count.passes_on
    cleared = MEMORY.seconds(count.backward_bytes)
    return (
        forward + rows + rate.start * 1e-6,
        backward + rows / 2 + cleared + rate.backward_start * 1e-6,
    )


def _backward_memory(
    packet: torch._ops.OpOverloadPacket, moved: float, tensors: Sequence[Tensor], count: Counted
) -> float:
    if not count.reads_all:
        return 0.0
    if packet in _SUMS:
        return moved
    wanting = sum(tensor.requires_grad for tensor in tensors)
    return moved * (BACKWARD_OF_PRODUCT * wanting if wanting > 1 else BACKWARD_OF_ARITHMETIC)
