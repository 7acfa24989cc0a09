"""Forwards whose way or whose shapes depend on data: bool, item, nonzero, masks, experts."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.ranks.models.case import CLASSES, WIDTH, Batch, Case, Layers, classify

__all__ = ["CASES"]


class Branch(Layers):
    """An if on a placed value, an .item() in a condition, a loop of data-dependent length."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.second(self.first(x))
        if h.mean() > 0:
            h = torch.sin(h)
        if (h.abs().max() > 100).item():
            h = h * 0
        for _ in range(int(h.detach().sum().abs().item()) % 3 + 1):
            h = torch.tanh(self.third(h))
        out: Tensor = self.head(h)
        return out


class ReplicatedBranch(Layers):
    """A condition on the inputs, which every rank has, chooses the module to call."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        h = self.second(h) if x.sum() > 0 else self.third(h)
        out: Tensor = self.head(torch.tanh(h))
        return out


class RareBranch(Layers):
    """Some microbatches do not use the second layer."""

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.first(x))
        if x[0, 0] > 0:
            h = self.second(h)
        out: Tensor = self.head(self.third(h))
        return out


def rare(step: int, rows: int) -> Batch:
    """Rows that begin with 1 use the layer: the first of eight, or the first and last of sixteen."""
    x, y = classify(step, rows)
    place = torch.arange(rows) % (8 if step % 2 else 16)
    x[:, 0] = torch.where((place < 2) | (place > 13), 1.0, -1.0)
    return x, y


class Nonzero(Layers):
    """Shapes that only the home of a value knows: nonzero, masks, unique."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.second(torch.tanh(self.first(x)))
        rows = (h[:, 0] > 0).nonzero(as_tuple=True)[0]
        chosen = h[h[:, 1] > 0]
        kinds = torch.unique(h[:, 2] > 0)
        extra = chosen.sum() * 0.1 + rows.sum() * 0.01 + kinds.numel() * 0.1
        out: Tensor = self.head(self.third(h)) + torch.stack([extra, -extra, extra * 0, extra * 2])
        return out


class Select(nn.Module):
    """A module whose output's first size depends on data."""

    def forward(self, h: Tensor) -> Tensor:
        return h[h[:, 0] > 0]


class Selecting(Layers):
    """The selected rows go on to another stage."""

    def __init__(self) -> None:
        super().__init__()
        self.select = Select()

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.first(x))
        chosen = self.third(self.select(self.second(h)))
        out: Tensor = self.head(h + chosen.sum(0))
        return out


class Masked(Layers):
    """where, masked_fill, gather, scatter, top-k, sorting and indexed assignment of placed values."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        h = torch.where(h > 0, h, h * 0.1)
        best, index = self.second(h).topk(4, dim=1)
        h = torch.zeros_like(h).scatter(1, index, best).masked_fill(h < -1, 0.5)
        ordered, order = self.third(h).sort(dim=1)
        h = h.gather(1, order) + ordered
        h = torch.index_select(h, 1, torch.arange(WIDTH).flip(0))
        h = torch.cat([h[:, :2], h[:, 2:] * (h[:, 2:] > 0)], 1)
        out: Tensor = self.head(h)
        return out


class Expert(nn.Module):
    """One expert."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.layer(x))


class Experts(nn.Module):
    """A mixture of experts: each row goes to the expert that the router chooses; some get none."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, 4)
        self.experts = nn.ModuleList(Expert() for _ in range(4))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        gate, choice = self.router(x).softmax(1).max(1)
        mixed = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            rows = torch.where(choice == number)[0]
            if rows.numel():
                mixed.index_add_(0, rows, expert(x[rows]) * gate[rows, None])
        out: Tensor = self.head(mixed + x)
        return out


class Numbers(Layers):
    """Reads a placed tensor in every way that needs its value."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.second(torch.tanh(self.first(x)))
        seen = h.detach()
        facts = [float(seen.mean()), int(seen.argmax()), len(seen.tolist()), float(seen.numpy().max())]
        words = f"{seen.sum():.2f} {seen[0, 0]}"
        flags = bool(torch.isnan(seen).any()), torch.allclose(seen, seen), torch.equal(seen, seen + 1)
        assert words and flags == (False, True, False) and h[0, 0] == h[0, 0]
        out: Tensor = self.head(self.third(h) + facts[0] + facts[1] % 3 * 0.1 + facts[3] * 0.01 * facts[2])
        return out


class Rows(Layers):
    """Iterates over a placed tensor and over its pieces."""

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.first(x))
        rows = torch.stack([self.second(row) for row in h])
        left, right = rows.chunk(2, 1)
        a, b = torch.split(torch.cat([right, left], 1), [4, WIDTH - 4], dim=1)
        top = torch.stack([h, rows]).max(dim=0)
        out: Tensor = self.head(self.third(torch.cat([b, a], 1)) + top.values + top.indices * 0.1)
        return out


def reading_loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """A loss that depends on its own value, and metrics computed on the way."""
    logits = model(x)
    loss = F.cross_entropy(logits, y)
    accuracy = (logits.argmax(1) == y).float().mean().item()
    assert 0 <= accuracy <= 1
    return loss * 2 if loss.item() > 1 else loss * 3


UNUSED = {"find_unused_parameters": True}  # replicas ask for it

CASES = (
    Case("bool and item", Branch, whole=False, settings=UNUSED),
    Case("branch on an input", ReplicatedBranch, whole=False, settings=UNUSED),
    Case(
        "branch that some microbatches take",
        RareBranch,
        batch=rare,
        fixed={2: {"a stage of its own": {"second": 1}}},
        whole=False,
        settings=UNUSED,
    ),
    Case("nonzero and masks", Nonzero, whole=False),
    Case("module with data-dependent shape", Selecting, ("first", "second", "select", "third"), whole=False),
    Case("masked and sorted", Masked),
    Case(
        "experts",
        Experts,
        ("router", *(f"experts.{i}" for i in range(4)), "head"),
        whole=False,
        settings=UNUSED,
    ),
    Case("values read", Numbers, whole=False),
    Case("rows and pieces", Rows),
    Case("loss that depends on its value", Rows, loss=reading_loss, whole=False),
)
