"""FusedLayerNorm: layer normalisation with apex's settings (``smp.nn.FusedLayerNorm``)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

__all__ = ["FusedLayerNorm"]


class TorchLayerNorm(nn.LayerNorm):
    """torch's layer normalisation, which is one fused kernel, with apex's settings.

    Args:
        normalized_shape: the last axes of the input, over which mean and variance are taken.
        eps: added to the variance.
        elementwise_affine: learn a weight and a bias.
        memory_efficient: accepted and ignored; torch's kernel keeps only mean and deviation anyway.
    """

    def __init__(
        self,
        normalized_shape: int | Sequence[int],
        eps: float = 1e-5,
        elementwise_affine: bool = True,
        memory_efficient: bool = False,
    ) -> None:
        shape = [normalized_shape] if isinstance(normalized_shape, int) else list(normalized_shape)
        super().__init__(shape, eps=eps, elementwise_affine=elementwise_affine)


def _apex() -> Any:
    """apex's class, or None if apex or a GPU is missing."""
    if not torch.cuda.is_available():
        return None
    try:
        from apex.normalization import FusedLayerNorm as found
    except ImportError:
        return None
    return found


FusedLayerNorm: Any = _apex() or TorchLayerNorm
