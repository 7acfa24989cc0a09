"""Training steps that more than one benchmark takes: by hand in plain PyTorch, and with the library."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

import smdistributed.modelparallel.torch as smp
from benchmarks.pipeline.cases import Case

__all__ = ["LEARNING_RATE", "build", "library_step", "plain_step"]

LEARNING_RATE = 1e-4


def build(case: Case) -> nn.Sequential:
    """The model, the same on every call."""
    torch.manual_seed(0)
    return case.build()


def plain_step(case: Case, microbatches: int) -> Callable[[], Tensor]:
    """The whole model in this process, its microbatches by hand."""
    model = build(case)
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    inputs, targets = case.batch(microbatches)

    def step() -> Tensor:
        optimizer.zero_grad()
        losses = []
        for x, y in zip(inputs.chunk(microbatches), targets.chunk(microbatches), strict=True):
            loss = case.loss(model(x), y)
            torch.autograd.backward(loss / microbatches)
            losses.append(loss.detach())
        optimizer.step()
        return torch.stack(losses).mean()

    return step


def library_step(case: Case, module: nn.Sequential, microbatches: int) -> Callable[[], Tensor]:
    """``module``, trained by the library; ``smp.init`` comes before."""
    model = smp.DistributedModel(module)
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=LEARNING_RATE))
    inputs, targets = case.batch(microbatches)

    @smp.step
    def train(x: Tensor, y: Tensor) -> Tensor:
        loss = case.loss(model(x), y)
        model.backward(loss)
        return loss

    def step() -> Tensor:
        optimizer.zero_grad()
        loss: Tensor = train(inputs, targets).reduce_mean()
        optimizer.step()
        return loss

    return step
