"""Activation checkpointing of both kinds, inside stages and across them."""

# mypy: disable-error-code="no-untyped-call, no-any-return"
# some of torch's own functions have no annotations
from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

from tests.ranks.models.case import CLASSES, WIDTH, Case, Layers

__all__ = ["CASES"]


class OfModules(Layers):
    """Children are checkpointed one by one."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        h: Any = torch.tanh(self.first(x))
        h = checkpoint(self.second, h, use_reentrant=self.reentrant)
        h = checkpoint(self.third, torch.tanh(h), use_reentrant=self.reentrant)
        out: Tensor = self.head(h)
        return out


class OfFunctions(Layers):
    """A piece of glue that spans stages is checkpointed, with a keyword and a second output."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        def piece(h: Tensor, scale: float) -> tuple[Tensor, Tensor]:
            h = torch.tanh(self.second(h))
            return self.third(h) * scale, h

        h, early = checkpoint(piece, self.first(x), 0.5, use_reentrant=self.reentrant)
        out: Tensor = self.head(torch.tanh(h) + early)
        return out


class InPlaceInside(Layers):
    """An activation inside a checkpoint, a module of its own, changes its argument in place."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.reentrant = reentrant
        self.act = nn.Hardswish(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        def piece(h: Tensor) -> Tensor:
            return self.third(self.act(self.second(h) * 2))

        h: Any = checkpoint(piece, torch.tanh(self.first(x)), use_reentrant=self.reentrant)
        out: Tensor = self.head(h)
        return out


class KeepsInside(Layers):
    """Something inside a checkpoint is used without being returned: a constant if that is reentrant."""

    kept: Tensor
    early: Tensor

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        def inner(h: Tensor) -> Any:
            self.early = self.second(h)
            return torch.tanh(self.early)

        def outer(h: Tensor) -> Tensor:
            h = checkpoint(inner, h, use_reentrant=self.reentrant)
            self.kept = torch.tanh(self.third(h))[:, :4]
            return self.third(h) + self.kept.sum() + self.early

        h: Any = checkpoint(outer, self.first(x), use_reentrant=self.reentrant)
        out: Tensor = self.head(h) * self.kept + self.early[:, :4]
        return out


class Closing(nn.Module):
    """Checkpoints a function that uses a tensor without taking it, as Hugging Face's layers do keywords."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.reentrant = reentrant
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, scale: Tensor) -> Any:
        return checkpoint(lambda h: torch.tanh(self.linear(h)) * scale, x, use_reentrant=self.reentrant)


class Closures(Layers):
    """What the function uses comes from elsewhere."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.third = Closing(reentrant)  # type: ignore[assignment]

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.third(torch.tanh(self.first(x)), self.second(x)))
        return out


class Block(nn.Module):
    """Checkpoints its own inside."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.reentrant = reentrant
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        inner: Any = checkpoint(lambda h: self.down(torch.relu(self.up(h))), x, use_reentrant=self.reentrant)
        return x + inner


def blocks(reentrant: bool) -> nn.Module:
    return nn.Sequential(
        nn.Linear(WIDTH, WIDTH), Block(reentrant), Block(reentrant), nn.Linear(WIDTH, CLASSES)
    )


class Pieces(nn.Module):
    """checkpoint_sequential over a list that spans stages."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.reentrant = reentrant
        self.start = nn.Linear(WIDTH, WIDTH)
        self.body = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(4)))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        h = checkpoint_sequential(self.body, 2, self.start(x), use_reentrant=self.reentrant)
        out: Tensor = self.head(h)
        return out


class Nested(Layers):
    """A checkpointed function that checkpoints."""

    def forward(self, x: Tensor) -> Tensor:
        def inner(h: Tensor) -> Tensor:
            return torch.tanh(self.third(h))

        def outer(h: Tensor) -> Any:
            return checkpoint(inner, torch.tanh(self.second(h)), use_reentrant=False) + h

        out: Tensor = self.head(checkpoint(outer, self.first(x), use_reentrant=False))
        return out


BODY = ("start", *(f"body.{i}" for i in range(4)), "head")


def both(name: str, model: Any, parts: tuple[str, ...], *, whole: bool = True) -> tuple[Case, Case]:
    """A case for each kind of checkpointing."""
    return (
        Case(f"{name}, reentrant", lambda: model(True), parts, whole=whole),
        Case(f"{name}, non-reentrant", lambda: model(False), parts, whole=whole),
    )


CASES = (
    *both("modules", OfModules, ("first", "second", "third", "head")),
    *both("functions across stages", OfFunctions, ("first", "second", "third", "head")),
    *both("inside modules", blocks, ("0", "1", "2", "3")),
    *both("checkpoint_sequential", Pieces, BODY),
    *both("in place inside", InPlaceInside, ("first", "second", "act", "third", "head")),
    *both("kept inside", KeepsInside, ("first", "second", "third", "head"), whole=False),
    *both("closures", Closures, ("first", "second", "third", "head")),
    Case("nested", Nested),
)
