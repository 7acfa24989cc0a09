"""Tensors that modules keep in attributes, from one part of a microbatch for another."""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.ranks.models.case import CLASSES, WIDTH, Case, Layers, plain_module

__all__ = ["CASES"]


class Kept(Layers):
    """The whole model keeps a tensor and comes back to it."""

    def forward(self, x: Tensor) -> Tensor:
        self.kept = torch.tanh(self.first(x))
        h = self.third(torch.tanh(self.second(self.kept)))
        out: Tensor = self.head(h + self.kept)
        return out


class KeptTwice(Layers):
    """The same attribute is written before and after every change of stage, and forgotten at the end.

    Meanwhile another method stands in for one, as when PEFT generates.
    """

    def forward(self, x: Tensor) -> Tensor:
        plain, self.bend = self.bend, self.bend_more  # type: ignore[method-assign]
        self.kept: Tensor | None = self.bend(self.first(x))
        self.kept = self.kept + self.bend(self.second(self.kept))
        self.kept = self.kept + self.bend(self.third(self.kept))
        out: Tensor = self.head(self.kept)
        self.kept = None
        self.bend = plain  # type: ignore[method-assign]
        return out

    def bend(self, x: Tensor) -> Tensor:
        return torch.tanh(x)

    def bend_more(self, x: Tensor) -> Tensor:
        return torch.tanh(2 * x)


class Metric(nn.Module):
    """Its hash changes with its state, as that of torchmetrics' metrics does."""

    seen = 0

    def __hash__(self) -> int:
        return hash((id(self), self.seen))


class KeptInMetric(Layers):
    """Every forward sets a number of such a module, and changes it between stages."""

    def __init__(self) -> None:
        super().__init__()
        self.metric = Metric()

    def forward(self, x: Tensor) -> Tensor:
        self.metric.seen = 1
        h = torch.tanh(self.second(torch.tanh(self.first(x))))
        self.metric.seen += 1
        out: Tensor = self.head(torch.tanh(self.third(h))) * self.metric.seen
        self.metric.seen = 0
        return out


class KeptMask(Layers):
    """What is kept is on every rank."""

    def forward(self, x: Tensor) -> Tensor:
        self.mask = (x[:, :CLASSES] > 0).float()
        out: Tensor = self.head(torch.tanh(self.third(torch.tanh(self.second(torch.tanh(self.first(x)))))))
        return out * self.mask


class KeptTogether(Layers):
    """A new dict and a new list for every microbatch."""

    def forward(self, x: Tensor) -> Tensor:
        self.seen: dict[str, Tensor] = {}
        self.losses: list[Tensor] = []
        for name in ("first", "second", "third"):
            x = torch.tanh(self.get_submodule(name)(x))
            self.seen[name] = x
            self.losses.append(x.square().mean())
        out: Tensor = self.head(x + self.seen["first"])
        return out * torch.stack(self.losses).sum()


class Expert(nn.Module):
    """Keeps a loss of its own, as routers to experts do."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.aux: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        self.aux = y.logsumexp(1).square().mean()
        return torch.tanh(y)


def experts() -> nn.Module:
    return nn.Sequential(Expert(), Expert(), Expert(), nn.Linear(WIDTH, CLASSES))


def with_losses_of_experts(model: Any, x: Tensor, y: Tensor) -> Tensor:
    loss = F.cross_entropy(model(x), y)
    for child in plain_module(model).children():
        if isinstance(child, Expert):
            loss = loss + 0.1 * child.aux
    return loss


class Remembering(nn.Module):
    """Run twice a microbatch; what it has seen never leaves its rank otherwise."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, again: bool) -> Tensor:
        y: Tensor = torch.tanh(self.linear(x))
        if again:
            return y + self.seen
        self.seen = y * 2
        return y


class Returning(Layers):
    """Comes back to a module that remembers the first time."""

    def __init__(self) -> None:
        super().__init__()
        self.first = Remembering()  # type: ignore[assignment]

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.third(self.second(self.first(x, False))))
        out: Tensor = self.head(self.first(h, True))
        return out


def kept_by_hooks() -> nn.Module:
    """Hooks write into attributes of the modules that they are on."""

    class Hooked(Layers):
        def forward(self, x: Tensor) -> Tensor:
            h = self.third(torch.tanh(self.second(torch.tanh(self.first(x)))))
            out: Tensor = self.head(torch.tanh(h) + self.first.out + self.second.out)
            return out

    def keep(module: nn.Module, given: Any, out: Tensor) -> None:
        module.out = out

    model = Hooked()
    model.first.register_forward_hook(keep)
    model.second.register_forward_hook(keep)
    return model


def made_by_hooks() -> nn.Module:
    """A hook makes a weight before each call."""

    def scale(module: nn.Module, given: Any) -> None:
        module.weight = module.raw * module.gain.exp()

    class Scaled(Layers):
        def forward(self, x: Tensor) -> Tensor:
            h = self.third(torch.tanh(self.second(torch.tanh(self.first(x)))))
            out: Tensor = self.head(torch.tanh(self.second(h)))
            return out

    model = Scaled()
    for one in (model.first, model.second, model.third):
        one.raw = nn.Parameter(one.weight.detach().clone())
        one.gain = nn.Parameter(torch.full((WIDTH, 1), 0.1))
        del one.weight
        one.register_forward_pre_hook(scale)
    return model


class Pointing(nn.Linear):
    """Keeps an object that pickle refuses in a way of its own."""

    def forward(self, x: Tensor) -> Tensor:
        self.pointer = ctypes.pointer(ctypes.c_int(len(x)))
        return super().forward(x)


def kept_for_itself() -> nn.Module:
    return nn.Sequential(Pointing(WIDTH, WIDTH), nn.Tanh(), Pointing(WIDTH, CLASSES))


CASES = (
    Case("kept for itself", kept_for_itself, parts=("0", "1", "2")),
    Case("kept by the model", Kept),
    Case("kept again and again", KeptTwice),
    Case("kept in a module with a hash of its own", KeptInMetric),
    Case("kept on every rank", KeptMask),
    Case("kept in a dict and a list", KeptTogether, whole=False),
    Case("losses of experts", experts, parts=("0", "1", "2", "3"), loss=with_losses_of_experts, whole=False),
    Case("kept on one rank", Returning),
    Case("kept by hooks", kept_by_hooks),
    Case("made by hooks", made_by_hooks),
)
