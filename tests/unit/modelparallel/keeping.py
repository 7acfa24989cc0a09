"""A module that keeps what modules keep beside parameters, for tests of all that must know of it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["Keeping"]


class Keeping(nn.Linear):
    """Has attributes, a container, and a buffer."""

    mean: Tensor
    loss: Any

    def __init__(self) -> None:
        super().__init__(2, 2)
        self.register_buffer("mean", torch.zeros(2))
        self.losses: list[Any] = []
        self.count = 0
