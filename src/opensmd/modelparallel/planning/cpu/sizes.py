"""How many bytes tensors have, also those without data."""

from __future__ import annotations

from torch import Tensor

__all__ = ["size_of"]


def size_of(tensor: Tensor) -> int:
    """The bytes of a tensor, also of a sparse one or of one without data."""
    return tensor.numel() * tensor.element_size()
