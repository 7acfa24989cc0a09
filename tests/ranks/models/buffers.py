"""Modules with buffers: normalisation with running statistics, counters, parametrisations."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.ranks.models.case import CLASSES, WIDTH, Case, Layers

__all__ = ["CASES"]


class Normalised(Layers):
    """BatchNorm on several stages; statistics are those of the microbatches."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.BatchNorm1d(WIDTH), nn.BatchNorm1d(WIDTH, momentum=None)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.relu(self.norm1(self.first(x)))
        out: Tensor = self.head(self.third(self.norm2(self.second(h))))
        return out


class Residual(nn.Module):
    """Two convolutions with norms beside a shortcut."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(3, 3, 3, padding=1, bias=False), nn.BatchNorm2d(3)
        self.conv2, self.norm2 = nn.Conv2d(3, 3, 3, padding=1, bias=False), nn.BatchNorm2d(3)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        out = self.norm2(self.conv2(self.relu(self.norm1(self.conv1(x)))))
        out += x
        out = self.relu(out)
        assert isinstance(out, Tensor)
        return out


class Images(nn.Module):
    """A residual network on 2 x 2 images of 3 channels."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(Residual(), Residual(), Residual())
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.blocks(x.view(-1, 3, 2, 2)).flatten(1))
        return out


class Counts(Layers):
    """Buffers that forward reads and changes: a counter, a moving average, one outside the state dict."""

    calls: Tensor
    average: Tensor
    table: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))
        self.register_buffer("average", torch.zeros(WIDTH))
        self.register_buffer("table", torch.linspace(0, 1, WIDTH), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        h = self.second(torch.tanh(self.first(x))) + self.table
        self.calls += 1
        self.average.mul_(0.9).add_(h.detach().mean(0), alpha=0.1)
        out: Tensor = self.head(self.third(h) - self.average + self.calls * 0.01)
        return out


class Replaces(Layers):
    """A buffer is replaced by a new tensor in each forward, inside one module."""

    def __init__(self) -> None:
        super().__init__()
        self.second = MovingScale()  # type: ignore[assignment]

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.third(self.second(torch.tanh(self.first(x)))))
        return out


class MovingScale(nn.Module):
    """Assigns its buffer anew."""

    scale: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("scale", torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        self.scale = self.scale * 0.9 + x.detach().abs().mean(0) * 0.1
        y: Tensor = self.linear(x) * self.scale
        return y


class Spectral(Layers):
    """Parametrisations and weight norm: parameters behind other names, buffers updated in forward."""

    def __init__(self) -> None:
        super().__init__()
        nn.utils.parametrizations.weight_norm(self.first)
        nn.utils.parametrizations.spectral_norm(self.second)
        nn.utils.parametrizations.orthogonal(self.third)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.third(self.second(torch.tanh(self.first(x)))))
        return out


class Listed(Layers):
    """A list of layers with norms; what is before and after it may live elsewhere."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False), nn.BatchNorm1d(WIDTH), nn.Tanh())
            for _ in range(2)
        )

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.first(x))
        for layer in self.layers:
            h = layer(h)
        out: Tensor = self.head(h + self.second(h) + self.third(h))
        return out


class Borrowed(Layers):
    """Calls a norm that is inside a module which runs as a whole, and then the whole."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Tanh())  # type: ignore[assignment]

    def forward(self, x: Tensor) -> Tensor:
        h = self.first[1](x)  # type: ignore[index]
        out: Tensor = self.head(torch.tanh(self.third(torch.tanh(self.second(self.first(h))))))
        return out


class Iterated(Layers):
    """Calls what is in a Sequential, which is on a lower stage than what it gets, and not the Sequential."""

    def __init__(self) -> None:
        super().__init__()
        self.second = nn.Sequential(  # type: ignore[assignment]
            nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Tanh(), nn.BatchNorm1d(WIDTH, momentum=None)
        )

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.first(x))
        for layer in self.second:
            h = layer(h)
        out: Tensor = self.head(self.third(h))
        return out


class NormThenMix(nn.BatchNorm1d):
    """Calls torch's function itself, and has a child that may live elsewhere, which splits the norm."""

    def __init__(self) -> None:
        super().__init__(WIDTH)
        self.mix = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        h = F.batch_norm(
            x, self.running_mean, self.running_var, self.weight, self.bias, self.training, momentum=0.1
        )
        out: Tensor = self.mix(torch.tanh(h))
        return out


class NormsWithChildren(Layers):
    """Running statistics that an operation between modules updates, among its other arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.second, self.third = NormThenMix(), NormThenMix()  # type: ignore[assignment]

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.third(self.second(torch.tanh(self.first(x)))))
        return out


NORMALISED = ("first", "norm1", "second", "norm2", "head")
CHAIN = {2: {"chain": {"third": 1, "head": 1}}}

BACK = {
    2: {"back": {"first": 1, "second": 0, "third": 1, "head": 1}, "back at the end": {"first": 1}},
    4: {"back": {"first": 3, "second": 2, "third": 1, "head": 0}},
}
LIST = {2: {"the list on one stage": {"first": 1, "layers": 0, "second": 1, "third": 1, "head": 1}}}

CASES = (
    # Four rows in the smallest microbatch: from two, BatchNorm makes 1 and -1 whatever they are. Gradients
    # before it then cancel to rounding, and plain PyTorch that adds as replicas do differs from itself.
    Case("batch norm", Normalised, NORMALISED, whole=False, rows=32),
    Case("residual network", Images, ("blocks.0", "blocks.1", "blocks.2", "head"), whole=False, rows=16),
    # with more microbatches a later one may write before an earlier one, back from another stage, has read
    Case("counters and averages", Counts, whole=False, replicas=False, microbatches=(1,)),
    Case(
        "counters and averages in a chain",
        Counts,
        (),
        fixed=CHAIN,
        automatic=False,
        whole=False,
        replicas=False,
    ),
    Case("buffers replaced", Replaces, whole=False, replicas=False),
    # norms over the 4 rows of a microbatch magnify rounding, which differs from torch to torch
    Case("norms in a list", Listed, fixed=LIST, whole=False, rows=32, tolerance=2e-6),
    Case("a norm called from outside", Borrowed, (), fixed=CHAIN, whole=False, replicas=False, rows=32),
    Case(
        "norms with children elsewhere",
        NormsWithChildren,
        ("first", "second.mix", "third", "third.mix", "head"),
        whole=False,
        rows=32,
    ),
    Case("parametrisations", Spectral, whole=False, replicas=False),
    Case("a Sequential called layer by layer", Iterated, (), fixed=BACK, whole=False, rows=32),
)
