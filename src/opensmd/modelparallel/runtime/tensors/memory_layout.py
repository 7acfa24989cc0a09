"""The order in which a tensor's elements travel: as in memory, if both ends can tell.

Both ends use the form that all ranks know, not that of the tensor that happens to be there.
"""

from __future__ import annotations

import functools
import itertools
import operator
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

__all__ = ["arranged", "contiguous_strides", "in_memory_order", "is_sparse", "strides_kept", "strides_of"]

_SPARSE = frozenset(
    {torch.sparse_coo, torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc}
)


def is_sparse(tensor: Tensor) -> bool:
    """Whether the tensor is sparse, in any layout, and so has no strides or memory of its own."""
    layout = tensor.layout
    return layout is not torch.strided and layout in _SPARSE


def strides_of(tensor: Tensor) -> tuple[int, ...]:
    """Return a tensor's strides; for a sparse one, those of a contiguous tensor of its shape."""
    return contiguous_strides(tensor.shape) if is_sparse(tensor) else tensor.stride()


def contiguous_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the strides that torch gives to a new tensor of this shape."""
    # An empty axis counts as an axis of size 1.
    sizes = (max(size, 1) for size in reversed(shape[1:]))
    return tuple(reversed([*itertools.accumulate(sizes, operator.mul, initial=1)])) if shape else ()


@functools.lru_cache(maxsize=4096)
def strides_kept(shape: Sequence[int], stride: Sequence[int]) -> tuple[int, ...]:
    """Return the strides that a tensor of this form has on arrival; none if it arrives contiguous.

    Strides are kept if the elements are adjacent without gaps, in an order other than that of the indices.
    """
    # The stride of a dimension of size 1 is meaningless, and torch sets it arbitrarily.
    steps = [(step, size) for size, step in zip(shape, stride, strict=True) if size != 1]
    # Contiguous tensors need no strides; those with gaps or overlaps would travel with what is in between.
    if 0 in shape or _follow(reversed(steps)) or not _follow(sorted(steps)):
        return ()
    return tuple(stride)


def _follow(steps: Iterable[tuple[int, int]]) -> bool:
    """Whether each stride equals the product of the sizes before it."""
    expected = 1
    for step, size in steps:
        if step != expected:
            return False
        expected *= size
    return True


def in_memory_order(tensor: Tensor, shape: Sequence[int], stride: Sequence[int]) -> Tensor:
    """Return what is sent for a tensor of this form: its memory if its strides are kept, else itself."""
    kept = strides_kept(shape, stride)
    if not kept:
        return tensor
    # Both ends have agreed on a form; a tensor with another one is converted.
    if tensor.stride() != kept:
        tensor = tensor.new_empty_strided(tensor.shape, kept).copy_(tensor)
    # Kept strides have no gaps, so the elements are one contiguous stretch of memory.
    return tensor.as_strided((tensor.numel(),), (1,))


def arranged(numbers: Tensor, shape: Sequence[int], kept: Sequence[int]) -> Tensor:
    """Return the received vector as a tensor of this shape, with the kept strides, if any."""
    return numbers.as_strided(shape, kept) if kept else numbers.view(shape)
