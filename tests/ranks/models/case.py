"""What a model must bring to be tried on any number of partitions: data, a loss, and parts to place.

Placements follow from the list of a model's parts: in order ("chain"), in turn ("looped", 0-1-0-1), from the
last stage to the first ("reversed"), or chosen by the partitioner ("automatic").
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

__all__ = [
    "CLASSES",
    "WIDTH",
    "Case",
    "Chain",
    "Layers",
    "classify",
    "cross_entropy",
    "plain_module",
    "sequences",
]

WIDTH = 12
CLASSES = 4

Batch = tuple[Any, ...]
Placement = Mapping[str, int]


def classify(step: int, rows: int) -> Batch:
    """Inputs of shape (rows, WIDTH) and classes of shape (rows,)."""
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(rows, WIDTH, generator=generator)
    return x, torch.randint(CLASSES, (rows,), generator=generator)


def sequences(step: int, rows: int) -> Batch:
    """Inputs of shape (rows, 5, WIDTH) and classes of shape (rows,)."""
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(rows, 5, WIDTH, generator=generator)
    return x, torch.randint(CLASSES, (rows,), generator=generator)


def cross_entropy(model: Any, x: Tensor, y: Tensor) -> Tensor:
    """The mean loss of logits."""
    return F.cross_entropy(model(x), y)


def plain_module(model: Any) -> Any:
    """The user's module, whether or not ``smp.DistributedModel`` wraps it."""
    return getattr(model, "module", model)


def forward_backward(case: Case, model: Any, backward: Callable[..., None], batch: Batch) -> Tensor:
    """What most training loops do with a batch."""
    loss = case.loss(model, *batch)
    backward(loss)
    return loss


@dataclass(frozen=True)
class Case:
    """One model with its training step.

    Attributes:
        name: unique in its family.
        model: makes the module; called with the random generator seeded.
        parts: names of modules to place, in order of execution; modules below go with them.
        batch: the tensors of a step, from the step's number and the number of rows.
        loss: the loss of one microbatch; the mean over microbatches is the loss of the batch.
        train: forward and backward of one microbatch, given (case, model, backward, batch); returns the loss.
        fixed: further placements by name, for each number of stages.
        automatic: whether to let the partitioner choose places, too.
        rows: of a batch; a multiple of 8 lets every number of microbatches divide it.
        microbatches: numbers of microbatches that work.
        replicas: one process computes with all replicas' batches what they compute each by itself.
        whole: the loss of the whole batch is the mean of the microbatches' (not so with BatchNorm).
        averaged: gradients are divided by the number of microbatches (``loss.backward()`` does not).
        tolerance: relative to the largest entry of each gradient.
        settings: keywords of ``smp.DistributedModel``.
    """

    name: str
    model: Callable[[], nn.Module]
    parts: tuple[str, ...] = ("first", "second", "third", "head")
    batch: Callable[[int, int], Batch] = classify
    loss: Callable[..., Tensor] = cross_entropy
    train: Callable[[Case, Any, Callable[..., None], Batch], Tensor] = forward_backward
    fixed: Mapping[int, Mapping[str, Placement]] = field(default_factory=dict)
    automatic: bool = True
    rows: int = 8
    microbatches: tuple[int, ...] = (1, 2, 4, 8)
    replicas: bool = True
    whole: bool = True
    averaged: bool = True
    tolerance: float = 1e-6
    settings: Mapping[str, Any] = field(default_factory=dict)

    def build(self) -> nn.Module:
        """The model with its first weights, the same at every call."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(11)
            return self.model()

    def placements(self, stages: int) -> dict[str, Placement | None]:
        """Every way to place the model on ``stages`` stages; None lets the partitioner choose."""
        count = len(self.parts)
        found: dict[str, Placement | None] = {}
        if count >= stages:
            chain = {part: position * stages // count for position, part in enumerate(self.parts)}
            found["chain"] = chain
            found["looped"] = {part: position % stages for position, part in enumerate(self.parts)}
            found["reversed"] = {part: stages - 1 - place for part, place in chain.items()}
        found.update(self.fixed.get(stages, {}))
        if self.automatic:
            found["automatic"] = None
        return found


class Layers(nn.Module):
    """Three layers and a head; subclasses wire them in ``forward``."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.second = nn.Linear(WIDTH, WIDTH)
        self.third = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, CLASSES)


class Chain(Layers):
    """Three layers and a head in a row."""

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.second(torch.tanh(self.first(x))))
        out: Tensor = self.head(self.third(h))
        return out
