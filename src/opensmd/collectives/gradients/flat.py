"""Many tensors as one flat tensor, and back, for model wrappers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TypeVar

import torch

__all__ = ["copy_back", "flatten", "group_by_dtype", "in_buckets", "parts_like"]


T = TypeVar("T", bound=torch.Tensor)


def group_by_dtype(tensors: Sequence[T]) -> list[list[T]]:
    """Group tensors into lists of one dtype and device, in order of first appearance."""
    groups: dict[tuple[torch.dtype, torch.device], list[T]] = {}
    for tensor in tensors:
        groups.setdefault((tensor.dtype, tensor.device), []).append(tensor)
    return list(groups.values())


def in_buckets(tensors: Sequence[T], limit: int) -> list[list[T]]:
    """Group into lists of one dtype and device, in order, of at most ``limit`` bytes or a single tensor."""
    buckets: list[list[T]] = []
    for same in group_by_dtype(tensors):
        size = limit + 1
        for tensor in same:
            if size + tensor.nbytes > limit:
                buckets.append([])
                size = 0
            buckets[-1].append(tensor)
            size += tensor.nbytes
    return buckets


def flatten(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return a new flat tensor with all elements, in order."""
    return torch.cat([tensor.detach().reshape(-1) for tensor in tensors])


def copy_back(flat: torch.Tensor, tensors: Sequence[torch.Tensor]) -> None:
    """Write a flat tensor's elements into the tensors."""
    for tensor, part in zip(tensors, parts_like(flat, tensors), strict=True):
        tensor.detach().copy_(part)


def parts_like(flat: torch.Tensor, tensors: Sequence[torch.Tensor]) -> Iterator[torch.Tensor]:
    """Return views of a flat tensor with the tensors' shapes."""
    start = 0
    for tensor in tensors:
        yield flat[start : start + tensor.numel()].view(tensor.shape)
        start += tensor.numel()
