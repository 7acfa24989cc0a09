"""The cost of views: forward moves nothing, but backward copies gradients of parts into the whole's."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from opensmd.modelparallel.planning.costs.cpu.rates import MEMORY, RATES, VIEW
from opensmd.modelparallel.planning.costs.cpu.sizes import size_of

__all__ = ["view_seconds"]

_aten = torch.ops.aten
# The backward of one part clears the whole and copies the gradient into it; that of all parts joins them.
_PARTS = {_aten.slice, _aten.select, _aten.diagonal, _aten.as_strided, _aten.unfold}
_ALL_PARTS = {_aten.split, _aten.split_with_sizes, _aten.unbind}


def view_seconds(
    packet: torch._ops.OpOverloadPacket, whole: Tensor, results: Sequence[Tensor], needs_gradient: bool
) -> tuple[float, float]:
    """Return forward and backward seconds of a view of ``whole``; the latter are 0 without a gradient."""
    forward = VIEW.start * 1e-6 * len(results)
    if not needs_gradient:
        return forward, 0.0
    return forward, VIEW.backward_start * 1e-6 * len(results) + _gradient_seconds(packet, whole, results)


def _gradient_seconds(packet: torch._ops.OpOverloadPacket, whole: Tensor, results: Sequence[Tensor]) -> float:
    if packet in _PARTS:
        start = 2 * RATES["arithmetic"].start * 1e-6
        return start + MEMORY.seconds(size_of(whole) + sum(2 * size_of(part) for part in results))
    if packet in _ALL_PARTS:
        return RATES["arithmetic"].start * 1e-6 + MEMORY.seconds(2 * size_of(whole))
    if packet is _aten.expand and results[0].numel() > whole.numel():
        rate = RATES["mean"]
        return 1e-9 * rate.forward * results[0].numel() + 1e-6 * rate.start
    return 0.0
