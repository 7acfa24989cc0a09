"""Stages that sleep instead of computing, and how long they have slept."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["WIDTH", "Layer", "Sleep"]

WIDTH = 64


class Sleep:
    """The sleeps of this rank.

    Attributes:
        unit: how long one is asked to last, in seconds.
        slept: how long all have lasted.
    """

    unit = 6e-3
    slept = 0.0

    @classmethod
    def once(cls) -> None:
        """Sleep, and count how long that was."""
        start = time.perf_counter()
        time.sleep(cls.unit)
        cls.slept += time.perf_counter() - start


class _OfInput(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        Sleep.once()
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        Sleep.once()
        return gradients[0].clone()


class _OfWeight(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor) -> Tensor:
        return weight.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        Sleep.once()
        return gradients[0].clone()


class Layer(nn.Module):
    """Sleeps once in forward, once for the gradient of its input and once for that of its weight."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        """The first layer has as much to do as the others."""
        x = x if x.requires_grad else x.detach().requires_grad_()
        out: Tensor = _OfInput.apply(x) * _OfWeight.apply(self.weight)  # type: ignore[no-untyped-call]
        return out
