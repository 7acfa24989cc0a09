"""Checking indices into something split: no rank may assume that an invalid one is another rank's."""

from __future__ import annotations

import torch
from torch import Tensor

from opensmd.modelparallel.dry_run.capture import is_tracing

__all__ = ["require_within"]


def require_within(indices: Tensor, size: int, what: str, *, besides: int | None = None) -> None:
    """Check that indices are within ``size`` entries, without waiting for their device.

    Args:
        what: what they are, for the error.
        besides: a number with a special meaning.

    Raises:
        RuntimeError: an index is outside; on an accelerator, its next operation raises.
    """
    if is_tracing():
        return
    known = (indices >= 0) & (indices < size)
    if besides is not None:
        known |= indices == besides
    torch._assert_async(known.all(), f"{what} is outside of 0 to {size - 1}")
