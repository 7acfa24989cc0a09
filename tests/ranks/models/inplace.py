"""In-place operations and views, on one stage and across stages."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.ranks.models.case import CLASSES, WIDTH, Case, Layers

__all__ = ["CASES"]


class Glue(Layers):
    """Placed values are changed in place between modules."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        h += 1
        h.mul_(0.5).clamp_(-2, 2)
        g = self.second(torch.tanh(h))
        g += h  # changes what the second stage owns with what the first one owns
        g[:, :3] = 0.5
        g[:, 3] *= 2
        c = self.third(g * 1)
        c.mul_(2)
        F.relu_(c)
        out: Tensor = self.head(c)
        out.sub_(out.detach().mean())
        return out


class Views(Layers):
    """Views of placed tensors are written, and their bases read on another stage."""

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.first(x)) * 1.0
        left, right = h[:, :6], h[:, 6:]
        right.mul_(2)
        with torch.no_grad():
            sent = self.second(h)
        left.add_(sent[:, 6:])  # after h has been sent once
        again = self.third(h)
        turned = again.t()
        turned[0].add_(1)
        out: Tensor = self.head(again.view(-1, 2, 6).transpose(1, 2).reshape(-1, WIDTH) + self.second(h))
        return out


class IntoReplicated(Layers):
    """A buffer that every rank makes for itself is filled with placed values, view by view."""

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.first(x))
        board = torch.zeros(x.shape[0], WIDTH)
        left = board[:, :6]
        left.copy_(h[:, :6])
        right = board[:, 6:]
        right += self.second(h)[:, 6:]
        board[:, 3] = 1.0
        out: Tensor = self.head(self.third(board) + left.sum() * 0.1)
        return out


class OutArguments(Layers):
    """out= and the functions that write their first argument."""

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.first(x))
        with torch.no_grad():
            room = torch.empty_like(h)
            torch.add(h, 1, out=room)
            room.copy_(self.second(room))
        base = torch.zeros_like(h)
        base.index_copy_(1, torch.tensor([0, 2]), self.third(h)[:, :2])
        base.index_put_((torch.tensor([0]), torch.tensor([5])), h[0, 0])
        out: Tensor = self.head(h + base + room)
        return out


class Activations(nn.Module):
    """Modules that change their input, on the stage of the input or on the next one."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.relu = nn.ReLU(inplace=True)
        self.second = nn.Linear(WIDTH, WIDTH)
        self.silu = nn.SiLU(inplace=True)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        g = self.relu(h)
        k = self.second(g) + h  # h has been changed by relu
        out: Tensor = self.head(self.silu(k * 2) + k)
        return out


class Writes(nn.Module):
    """Changes what it is given and returns something else."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(x)
        x.mul_(0.5)
        return y


class Written(Layers):
    """The giver sees the change, though the module that made it lives elsewhere."""

    def __init__(self) -> None:
        super().__init__()
        self.second = Writes()  # type: ignore[assignment]

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.first(x)) + 0
        with torch.no_grad():
            seen = h.detach().clone()
            g = self.second(seen)
        out: Tensor = self.head(self.third(h + g) + seen)
        return out


class ReturnsViews(nn.Module):
    """Returns a view of its input and a view of its result."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, 2 * WIDTH)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        y = self.linear(x)
        return x.view(-1, 2, 6), y[:, :WIDTH], y[:, WIDTH:]


class ViewResults(Layers):
    """Results that are views of one another cross stages."""

    def __init__(self) -> None:
        super().__init__()
        self.second = ReturnsViews()  # type: ignore[assignment]

    def forward(self, x: Tensor) -> Tensor:
        same, left, right = self.second(torch.tanh(self.first(x)))
        out: Tensor = self.head(self.third(left * right) + same.flatten(1) + left)
        return out


class Reshaped(Layers):
    """Shapes change in place: of values of a stage, and of what is empty until one is written there."""

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.first(x)) * 1
        h.unsqueeze_(1)
        g = self.second(h) * 1
        g.squeeze_(1)
        turned = g.detach().clone()
        turned.t_()
        with torch.no_grad():
            room, best, places = torch.empty(0), torch.empty(0), torch.empty(0, dtype=torch.long)
            torch.mul(g, 2, out=room)
            torch.max(self.third(room), 1, out=(best, places))
        assert room.shape == x.shape and best.shape == places.shape == (len(x),)
        out: Tensor = self.head(self.third(g) + turned.t() + room + best[:, None] + places[:, None] * 0.1)
        return out


UNUSED = {"find_unused_parameters": True}  # replicas ask for it: one layer runs without gradients

CASES = (
    Case("glue", Glue, whole=False),
    Case("views", Views),
    Case("placed values into a replicated buffer", IntoReplicated, whole=False),
    Case("shapes", Reshaped, whole=False, settings=UNUSED),
    Case("out arguments", OutArguments, whole=False, settings=UNUSED),
    Case("in-place activations", Activations, ("first", "relu", "second", "silu", "head")),
    Case("a module that writes its input", Written, settings=UNUSED),
    Case("results that are views", ViewResults),
)
