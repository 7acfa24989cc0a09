"""Parameters and their gradients, the same in every call."""

from __future__ import annotations

import torch
from torch import Tensor, nn

__all__ = ["SHAPES", "gradients", "parameters"]

SHAPES = [(3, 4), (4,), (2, 2, 2)]


def parameters() -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    made = [nn.Parameter(torch.randn(shape, generator=generator, dtype=torch.float64)) for shape in SHAPES]
    return [*made, nn.Parameter(torch.zeros(3, dtype=torch.float64))]


def gradients(step: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(100 + step)
    return [torch.randn(p.shape, generator=generator, dtype=torch.float64) for p in parameters()]
