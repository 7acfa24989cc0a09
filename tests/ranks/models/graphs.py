"""Random models: a graph of small modules and operations, described by a text from which it is made again.

The text is JSON: ``places`` holds the stage of every module, ``head`` that of the last one, ``nodes`` what
happens in turn. A node is an operation followed by the numbers of its operands: of values (the input is
value 0, the value of node i is value i + 1) and, where it says so, of modules.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from tests.ranks.models.case import CLASSES, WIDTH, Case

__all__ = ["OPERATIONS", "make"]

Node = tuple[Any, ...]


def split_halves(a: Tensor, b: Tensor) -> Tensor:
    left, right = a.chunk(2, 1)[0], b.chunk(2, 1)[1]
    return torch.cat([right, left], 1)


def write_view(a: Tensor, b: Tensor) -> Tensor:
    a[:, 3:7].add_(b[:, 3:7], alpha=0.5)
    return a


def add_in_place(a: Tensor, b: Tensor) -> Tensor:
    return a.add_(b, alpha=0.5)


def fill(a: Tensor, b: Tensor) -> Tensor:
    board = torch.zeros(a.shape[0], WIDTH)
    board[:, :6] = a[:, :6]
    board[:, 6:] += b[:, 6:]
    return board


def branch(a: Tensor, b: Tensor) -> Tensor:
    return a * 1.5 if a.detach().sum() > 0 else b * 0.5


def select(a: Tensor, b: Tensor) -> Tensor:
    return b + a[a[:, 0] > 0].sum(0)


def detached(a: Tensor, b: Tensor) -> Tensor:
    return a.detach() + b


def top(a: Tensor, b: Tensor) -> Tensor:
    return torch.stack([a, b]).max(0).values


# what two values become; a module applied to a value is the node ("module", value, module)
OPERATIONS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "add": lambda a, b: a + b,
    "multiply": lambda a, b: torch.tanh(a) * b,
    "split_halves": split_halves,
    "write_view": write_view,
    "add_in_place": add_in_place,
    "fill": fill,
    "branch": branch,
    "select": select,
    "detached": detached,
    "top": top,
}


class Two(nn.Module):
    """A module of two inputs, and of two outputs of which one is used."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, a: Tensor, b: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        return torch.tanh(self.left(a) * self.right(b)), {"sum": a + b}


class Graph(nn.Module):
    """Runs the nodes in turn; the head sees the mean of all values that nothing else has used."""

    def __init__(self, nodes: list[Node], modules: int) -> None:
        super().__init__()
        self.nodes = nodes
        self.ones = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) if number % 2 else nn.Linear(WIDTH, WIDTH)
            for number in range(modules)
        )
        self.twos = nn.ModuleList(Two() for _ in range(modules))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        values = [x * 1.0]
        used: set[int] = set()
        for kind, *operands in self.nodes:
            values.append(self._value(kind, operands, values))
            used |= set(operands[:2]) if kind in OPERATIONS or kind == "two" else {operands[0]}
        free = [value for number, value in enumerate(values) if number not in used]
        out: Tensor = self.head(F.layer_norm(torch.stack(free).mean(0), (WIDTH,)))
        return out

    def _value(self, kind: str, operands: list[int], values: list[Tensor]) -> Any:
        first, second = values[operands[0]], operands[1]
        if kind == "module":
            return self.ones[second](first)
        if kind == "checkpoint":
            return checkpoint(self.ones[second], first, use_reentrant=bool(operands[2]))
        if kind == "no_grad":
            with torch.no_grad():
                return self.ones[second](first)
        if kind == "two":
            return self.twos[operands[2]](first, values[second])[0]
        return OPERATIONS[kind](first, values[second])


def make(text: str) -> Case:
    """The case that a text describes; its placement is called "drawn"."""
    spec = json.loads(text)
    nodes, places = [tuple(node) for node in spec["nodes"]], spec["places"]
    count = len(places) // 2
    names = [f"{kind}.{number}" for kind in ("ones", "twos") for number in range(count)]
    placement = dict(zip(names, places, strict=True)) | {"head": spec["head"]}
    return Case(
        text,
        lambda: Graph(nodes, count),
        parts=(),
        fixed={spec["stages"]: {"drawn": placement}},
        automatic=False,
        whole=False,
        tolerance=2e-6,
    )
