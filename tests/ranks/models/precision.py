"""Lower and mixed precision: autocast around the model, inside it and nested; bfloat16 and double weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.ranks.models.case import Batch, Case, Layers, cross_entropy

__all__ = ["CASES"]


def autocast(enabled: bool = True) -> torch.autocast:
    return torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled)


class Chain(Layers):
    """Activations between layers."""

    def forward(self, x: Tensor) -> Tensor:
        h = F.gelu(self.first(x))
        h = torch.tanh(self.second(h)) + h
        out: Tensor = self.head(self.third(h))
        return out


class Twice(Layers):
    """One layer is called twice."""

    def forward(self, x: Tensor) -> Tensor:
        h = F.gelu(self.first(x))
        h = torch.tanh(self.second(h)) + h
        out: Tensor = self.head(self.third(self.second(h)))
        return out


class Inside(Layers):
    """autocast in the forward of the root, switched off for a part."""

    def forward(self, x: Tensor) -> Tensor:
        with autocast():
            h = F.gelu(self.first(x))
            assert h.dtype == torch.bfloat16
            h = self.second(h)
            with autocast(enabled=False):
                h = self.third(h.float())
                assert h.dtype == torch.float32
            out: Tensor = self.head(h)
        return out.float()


class InModules(nn.Module):
    """A layer that opens autocast itself."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(12, 12)

    def forward(self, x: Tensor) -> Tensor:
        with autocast():
            y: Tensor = self.linear(x)
        return y


def modules() -> nn.Module:
    return nn.Sequential(InModules(), nn.Softmax(1), InModules(), nn.Linear(12, 4).bfloat16())


def bfloat16() -> nn.Module:
    return Twice().bfloat16()


def double() -> nn.Module:
    return Twice().double()


def autocast_loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    with autocast():
        return F.cross_entropy(model(x), y)


def then_autocast(case: Case, model: Any, backward: Callable[..., None], batch: Batch) -> Tensor:
    """A backward that is deferred, and then operations in autocast."""
    loss = case.loss(model, *batch)
    backward(loss)
    with autocast():
        more = case.loss(model, *batch)
    backward(more)
    return loss


def bfloat16_loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x.bfloat16()).float(), y)


def modules_loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x).float(), y)


def double_loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x.double()), y)


PARTS = ("0", "1", "2", "3")

# torch casts a weight once in an autocast context, and two uses of the cast add their gradients in bfloat16;
# a microbatch that leaves its context clears all casts, after which another one adds in float32. With any of
# eight microbatches adding in either way, plain PyTorch's bias gradients are up to 1.7e-2 apart: they cancel.
# bfloat16 weights add up their microbatches' gradients in bfloat16, in the order in which they come
CASES = (
    Case("autocast around the model", Chain, loss=autocast_loss, whole=False),
    Case("autocast around a layer used twice", Twice, loss=autocast_loss, whole=False, tolerance=2e-2),
    Case("autocast in forward", Inside, loss=cross_entropy, whole=False),
    Case("autocast after a backward", Chain, train=then_autocast, whole=False),
    Case("autocast in modules", modules, PARTS, loss=modules_loss, whole=False, tolerance=2e-2),
    Case("bfloat16 weights", bfloat16, loss=bfloat16_loss, whole=False, tolerance=2e-2),
    Case("double", double, loss=double_loss, tolerance=1e-12),
)
