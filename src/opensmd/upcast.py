"""Widening to float32: half precision would lose small updates, squares and long sums."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["upcast", "upcast_dtype"]

_WIDE = frozenset({torch.float32, torch.float64})


def upcast_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return float32 for a narrower floating-point type, and any other type unchanged."""
    return torch.promote_types(dtype, torch.float32) if dtype.is_floating_point else dtype


def upcast(tensor: Tensor) -> Tensor:
    """Return the tensor in float32, or itself if it is at least as wide or holds integers."""
    # The fast path: every step asks this of every parameter, and most are in float32.
    return tensor if tensor.dtype in _WIDE else tensor.to(upcast_dtype(tensor.dtype))
