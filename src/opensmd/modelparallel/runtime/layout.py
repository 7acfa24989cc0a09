"""In what order the numbers of a tensor travel: as they lie in memory, where both ends can tell."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

__all__ = ["empty_like_sent", "in_memory_order"]


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


def empty_like_sent(like: Tensor) -> tuple[Tensor, Tensor]:
    """Memory to receive into, and the tensor that it becomes, with the strides of ``like`` if they travel."""
    device = like.device
    if like.is_contiguous() or not _fills_memory(tuple(like.shape), like.stride()):
        made = torch.empty(like.shape, dtype=like.dtype, device=device)
        return made, made
    flat = torch.empty(like.numel(), dtype=like.dtype, device=device)
    return flat, flat.as_strided(like.shape, like.stride())
