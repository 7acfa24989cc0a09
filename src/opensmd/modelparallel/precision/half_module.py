"""A model with 16-bit parameters inside step functions that compute losses in 32 bits.

As in the original library's wrapper, arguments of the model's forward are narrowed, its results are widened,
and everything in between is computed in the narrow type.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from opensmd.modelparallel.runtime.tensors import structure

__all__ = ["narrowed", "to_half", "widened"]

_WIDE = (torch.float32, torch.float64)


def to_half(module: nn.Module, dtype: torch.dtype) -> None:
    """Convert floating-point parameters and buffers in place; the parameters stay the same objects."""
    if dtype is torch.float16:
        module.half()
    else:
        module.bfloat16()


def narrowed(values: Any, dtype: torch.dtype) -> Any:
    """Convert wide floating-point tensors in ``values`` to ``dtype``, also inside containers."""
    return _converted(values, _WIDE, dtype)


def widened(values: Any, dtype: torch.dtype) -> Any:
    """Convert tensors of ``dtype`` in ``values`` to FP32, also inside containers."""
    return _converted(values, (dtype,), torch.float32)


def _converted(values: Any, sources: tuple[torch.dtype, ...], target: torch.dtype) -> Any:
    tensors: list[Tensor] = structure.tensors_in(values)
    if not any(tensor.dtype in sources for tensor in tensors):
        return values
    converted = iter([tensor.to(target) if tensor.dtype in sources else tensor for tensor in tensors])
    return structure.substitute(values, converted)
