"""In what order the numbers of a tensor travel: as they lie in memory, where both ends can tell.

Both ends go by the form that all ranks know of the tensor, not by the tensor that happens to be there.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence

from torch import Tensor

__all__ = ["arranged", "in_memory_order", "strides_kept"]


@functools.lru_cache(maxsize=4096)
def strides_kept(shape: Sequence[int], stride: Sequence[int]) -> tuple[int, ...]:
    """The strides that a tensor of this form has on arrival; none if it arrives contiguous.

    Kept are those of tensors whose elements lie side by side without gaps, in another order than that of the
    indices.
    """
    steps = [(step, size) for size, step in zip(shape, stride, strict=True) if size != 1]
    if 0 in shape or _follow(reversed(steps)) or not _follow(sorted(steps)):
        return ()
    return tuple(stride)


def _follow(steps: Iterable[tuple[int, int]]) -> bool:
    """Whether each stride is what the sizes before it fill."""
    expected = 1
    for step, size in steps:
        if step != expected:
            return False
        expected *= size
    return True


def in_memory_order(tensor: Tensor, shape: Sequence[int], stride: Sequence[int]) -> Tensor:
    """What is sent of a tensor of this form: its memory if its strides are kept, else itself."""
    kept = strides_kept(shape, stride)
    if not kept:
        return tensor
    if tensor.stride() != kept:
        tensor = tensor.new_empty_strided(tensor.shape, kept).copy_(tensor)
    return tensor.as_strided((tensor.numel(),), (1,))


def arranged(numbers: Tensor, shape: Sequence[int], kept: Sequence[int]) -> Tensor:
    """The vector that has come as a tensor of this shape, with the strides that are kept, if any."""
    return numbers.as_strided(shape, kept) if kept else numbers.view(shape)
