"""The bytes of tensors, even those without data."""

from __future__ import annotations

from torch import Tensor

__all__ = ["size_of"]


def size_of(tensor: Tensor) -> int:
    """Return the bytes of a tensor, even of a sparse one or one without data."""
    return tensor.numel() * tensor.element_size()
