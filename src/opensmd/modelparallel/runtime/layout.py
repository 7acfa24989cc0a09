"""In what order the numbers of a tensor travel: as they lie in memory, where both ends can tell."""

from __future__ import annotations

import functools

from torch import Tensor

__all__ = ["arranged", "in_memory_order"]


@functools.lru_cache(maxsize=4096)
def _fills_memory(shape: tuple[int, ...], stride: tuple[int, ...]) -> bool:
    """Whether the elements lie side by side without gaps, in whatever order."""
    expected = 1
    for step, size in sorted((step, size) for size, step in zip(shape, stride, strict=True) if size != 1):
        if step != expected:
            return False
        expected *= size
    return True


def in_memory_order(tensor: Tensor) -> Tensor:
    """A contiguous tensor with the same numbers, without a copy where they lie side by side."""
    if tensor.is_contiguous() or not _fills_memory(tuple(tensor.shape), tensor.stride()):
        return tensor.contiguous()
    return tensor.as_strided((tensor.numel(),), (1,))


def arranged(numbers: Tensor, like: Tensor) -> Tensor:
    """The vector that has come as a tensor of the shape of ``like``, and of its strides if they travel."""
    if like.is_contiguous() or not _fills_memory(tuple(like.shape), like.stride()):
        return numbers.view(like.shape)
    return numbers.as_strided(like.shape, like.stride())
