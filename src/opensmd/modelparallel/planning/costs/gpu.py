"""The time of an operation on a GPU: roughly a current data-centre one.

The host starts operations while the GPU computes earlier ones, so an operation takes what is longest: to be
started from Python, its arithmetic, or its memory traffic.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from opensmd.modelparallel.planning.costs.cpu.sizes import size_of

__all__ = ["gpu_accumulation_seconds", "gpu_operation_seconds"]

PRODUCTS = 200e12  # floating-point operations per second, of 16 bits or TF32
FULL_PRODUCTS = 45e12  # of FP32
MEMORY = 2e12  # bytes per second
START = 20e-6

_aten = torch.ops.aten
_LOOKUPS = {_aten.embedding, _aten.index_select}  # which read no more than they return


def gpu_operation_seconds(
    packet: torch._ops.OpOverloadPacket,
    tensors: Sequence[torch.Tensor],
    results: Sequence[torch.Tensor],
    *,
    flops: float,
    needs_gradient: bool,
) -> tuple[float, float]:
    """Return the seconds of an operation and its backward."""
    moved = float(sum(map(size_of, results)))
    moved += moved if packet in _LOOKUPS else sum(map(size_of, tensors))
    forward = _longest(flops / _product_rate(results[0].dtype), moved)
    if not needs_gradient:
        return forward, 0.0
    if flops:
        wanting = sum(tensor.requires_grad and tensor.dim() > 1 for tensor in tensors)
        return forward, max(1, wanting) * forward
    if packet is _aten.embedding:
        # a dense gradient: the whole table is zeroed before the rows are added
        return forward, _longest(0.0, size_of(tensors[0]) + 2 * moved, 2)
    return forward, _longest(0.0, 1.5 * moved, 1.5)


def gpu_accumulation_seconds(size: int) -> float:
    """Return the time to add one microbatch's gradient of ``size`` bytes to the previous ones."""
    return _longest(0.0, 3.0 * size)


def _longest(arithmetic: float, moved: float, operations: float = 1.0) -> float:
    return max(arithmetic, moved / MEMORY, operations * START)


def _product_rate(dtype: torch.dtype) -> float:
    matmul: Any = torch.backends.cuda.matmul
    with_tf32 = dtype == torch.float32 and matmul.fp32_precision == "tf32"
    return PRODUCTS if with_tf32 or dtype.itemsize <= 2 else FULL_PRODUCTS
