"""Tensors as process groups send them: Gloo and NCCL read memory, past what torch does only when it reads."""

from __future__ import annotations

from torch import Tensor

__all__ = ["sendable"]


def sendable(tensor: Tensor) -> Tensor:
    """The tensor without its graph, contiguous, conjugated or negated in memory; maybe the same memory."""
    return tensor.detach().resolve_conj().resolve_neg().contiguous()
