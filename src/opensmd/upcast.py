"""Numbers in at least float32: half precision would lose small updates, squares and long sums."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["upcast", "upcast_dtype"]

_WIDE = frozenset({torch.float32, torch.float64})


def upcast_dtype(dtype: torch.dtype) -> torch.dtype:
    """Float32 in the place of a narrower floating-point type; any other as it is."""
    return torch.promote_types(dtype, torch.float32) if dtype.is_floating_point else dtype


def upcast(tensor: Tensor) -> Tensor:
    """The tensor in float32, or itself if it is as wide already; integers stay what they are."""
    # Asked of every parameter in every step, and most are in float32.
    return tensor if tensor.dtype in _WIDE else tensor.to(upcast_dtype(tensor.dtype))
