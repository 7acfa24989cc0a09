"""Plain wirings: chains, nesting, skips, modules used twice, tied weights, lists and dicts of modules."""

# mypy: disable-error-code="no-untyped-call"
# some of torch's own functions have no annotations
from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.ranks.models.case import CLASSES, WIDTH, Case, Layers

__all__ = ["CASES"]


def sequential() -> nn.Module:
    return nn.Sequential(
        nn.Linear(WIDTH, 16),
        nn.Tanh(),
        nn.Linear(16, 16),
        nn.ReLU(),
        nn.Linear(16, 16),
        nn.Linear(16, CLASSES),
    )


class Block(nn.Module):
    """A pre-norm residual block."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.mix = nn.Sequential(nn.Linear(WIDTH, 16), nn.GELU(), nn.Linear(16, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.mix(self.norm(x))
        return out


class Nested(nn.Module):
    """Blocks in a body: cut between blocks, inside a block, inside its Sequential."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(Block(), Block())
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.body(x))
        return out


class RootParameters(Layers):
    """The root itself owns a parameter and a buffer and works between its children."""

    shift: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.register_buffer("shift", torch.full((WIDTH,), 0.1))

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.first(x * self.scale) + self.shift)
        h = torch.tanh(self.third(self.second(h) * self.scale))
        out: Tensor = self.head(h)
        return out


class Skips(Layers):
    """Early values are used again on later stages, and late ones meet early ones."""

    def forward(self, x: Tensor) -> Tensor:
        a = torch.tanh(self.first(x))
        b = self.second(a)
        c = self.third(b + a) * a
        out: Tensor = self.head(c + b + x)
        return out


class Diamond(Layers):
    """Two branches from one value, joined."""

    def forward(self, x: Tensor) -> Tensor:
        h = torch.relu(self.first(x))
        left, right = self.second(h), self.third(h)
        out: Tensor = self.head(torch.cat([left, right], 1).unflatten(1, (2, WIDTH)).mean(1))
        return out


class Reused(Layers):
    """Modules are called twice, one of them with the same input."""

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.first(x))
        h = torch.tanh(self.second(h)) + self.second(h)
        h = self.first(self.third(h))
        out: Tensor = self.head(self.third(h))
        return out


class SameUnderTwoNames(Layers):
    """One module object is registered twice."""

    def __init__(self) -> None:
        super().__init__()
        self.again = self.second

    def forward(self, x: Tensor) -> Tensor:
        h = self.second(torch.tanh(self.first(x)))
        out: Tensor = self.head(self.again(torch.tanh(self.third(h))))
        return out


class SharedFunctions(nn.Module):
    """Layers and blocks share modules that have nothing of their own."""

    def __init__(self) -> None:
        super().__init__()
        activation, same = nn.ReLU(inplace=True), nn.Identity()
        self.first = nn.Sequential(nn.Linear(WIDTH, WIDTH), activation, nn.Linear(WIDTH, WIDTH), activation)
        self.second = nn.Sequential(nn.Linear(WIDTH, WIDTH), activation, same)
        self.third = nn.Linear(WIDTH, WIDTH)
        self.activation, self.same = activation, same
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.same(self.activation(self.third(self.second(self.first(x))))))
        return out


class Tied(nn.Module):
    """A word model whose head is its embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(CLASSES, WIDTH)
        self.first = nn.Linear(WIDTH, WIDTH)
        self.second = nn.Linear(WIDTH, WIDTH)
        self.out = nn.Linear(WIDTH, CLASSES, bias=False)
        self.out.weight = self.words.weight

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.second(torch.tanh(self.first(x + self.words(y))))
        out: Tensor = self.out(h)
        return out


def tied_loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x, (y + 1) % CLASSES), y)


class Listed(nn.Module):
    """A loop over a ModuleList and look-ups in a ModuleDict."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.ends = nn.ModuleDict({"norm": nn.LayerNorm(WIDTH), "head": nn.Linear(WIDTH, CLASSES)})
        self.gains = nn.ParameterList(nn.Parameter(torch.ones(WIDTH)) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer, gain in zip(self.layers, self.gains, strict=True):
            x = x + torch.tanh(layer(x)) * gain
        for end in self.ends.values():
            x = end(x)
        return x


class Identities(Layers):
    """A module that returns its input, given replicated and placed values."""

    def __init__(self) -> None:
        super().__init__()
        self.same = nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        again = self.same(x)
        h = self.same(self.first(again))
        out: Tensor = self.head(self.third(self.second(h)) + self.same(again))
        return out


class Unused(Layers):
    """One layer is never called: its gradients stay None. One result is computed and dropped."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        self.second(h)
        out: Tensor = self.head(h)
        return out


class Convolutions(nn.Module):
    """Images instead of vectors, with pooling and flattening in the glue."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(1, 4, 3, padding=1)
        self.second = nn.Conv2d(4, 6, 3, padding=1)
        self.head = nn.Linear(6, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        h = F.max_pool2d(torch.relu(self.first(x.view(-1, 1, 3, 4))), (1, 2))
        h = F.adaptive_avg_pool2d(torch.relu(self.second(h)), 1)
        out: Tensor = self.head(torch.flatten(h, 1))
        return out


LAYERS = (*(f"layers.{i}" for i in range(4)), "head")


class Host(nn.Module):
    """Calls a module that it is given, and one that it hides from registration."""

    def __init__(self, hidden: nn.Module) -> None:
        super().__init__()
        self.into, self.out = nn.Linear(WIDTH, 10 * WIDTH), nn.Linear(10 * WIDTH, WIDTH)
        self.hidden = [hidden]

    def forward(self, x: Tensor, shift: nn.Module) -> Tensor:
        x = x + shift(x) * self.hidden[0](x)
        out: Tensor = self.out(torch.tanh(self.into(x)))
        return out


class Guests(nn.Module):
    """Modules that are called inside others without being below them, as one bias for all attentions."""

    def __init__(self) -> None:
        super().__init__()
        self.help = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
        self.layers = nn.ModuleList(Host(self.help[1]) for _ in range(4))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x, self.help[0])
        out: Tensor = self.head(x)
        return out


class Neighbours(nn.Module):
    """Every row takes the mean of its neighbours', which a sparse matrix of all ranks tells."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, near: Tensor) -> Tensor:
        if near.layout is torch.sparse_coo and not near.is_coalesced():
            near._coalesced_(True)  # type: ignore[attr-defined]  # changes the version, and no number
        return torch.tanh(self.linear(x) + near @ x)


class Graph(nn.Module):
    """The matrix goes through layers of all stages."""

    def __init__(self, layout: torch.layout) -> None:
        super().__init__()
        self.layout = layout
        self.layers = nn.ModuleList(Neighbours() for _ in range(4))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        near = torch.eye(len(x)).roll(1, 0).to_sparse(layout=self.layout)
        if self.layout is torch.sparse_coo:
            near = (near + near).t()
        for layer in self.layers:
            x = layer(x, near)
        out: Tensor = self.head(x)
        return out


CASES = (
    Case("sequential", sequential, parts=("0", "1", "2", "3", "4", "5")),
    Case(
        "nested",
        Nested,
        parts=("body.0", "body.1", "head"),
        fixed={
            2: {
                "inside a block": {"body.0.mix": 1, "body.1.norm": 1},
                "inside its Sequential": {"body.0.mix.1": 1, "body.1.mix.2": 1, "head": 1},
            },
            4: {"everywhere": {"body.0.norm": 1, "body.0.mix.2": 2, "body.1": 3, "head": 1}},
        },
    ),
    Case("parameters of the root", RootParameters),
    Case("skips", Skips),
    Case("diamond", Diamond),
    Case("modules used twice", Reused),
    Case("one module under two names", SameUnderTwoNames, parts=("first", "second", "third", "head")),
    Case("shared activations", SharedFunctions),
    Case("tied weights", Tied, parts=("words", "first", "second", "out"), loss=tied_loss),
    Case("lists and dicts of modules", Listed, parts=(*(f"layers.{i}" for i in range(4)), "ends.head")),
    Case("identity", Identities, parts=("first", "same", "second", "third", "head")),
    Case("unused layer and dropped result", Unused, settings={"find_unused_parameters": True}),
    Case("convolutions", Convolutions, parts=("first", "second", "head")),
    Case("modules called in others", Guests, parts=()),
    Case("sparse matrix", lambda: Graph(torch.sparse_coo), parts=LAYERS, whole=False, replicas=False),
    Case(
        "compressed sparse matrix", lambda: Graph(torch.sparse_csr), parts=LAYERS, whole=False, replicas=False
    ),
)
