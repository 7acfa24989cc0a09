"""The model of split cases, its data, and the training that plain PyTorch does with them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from tests.faults.campaign.split.cases import STEPS, SplitCase

__all__ = ["Reference", "make_model", "make_optimizer", "plain_training", "rows"]

WIDTH = 24


def make_model(case: SplitCase) -> nn.Sequential:
    """Eight layers, two of which share nothing; the same on every rank."""
    torch.manual_seed(case.trial)
    layers: list[nn.Module] = [nn.Linear(8, WIDTH), nn.Tanh()]
    for _ in range(2):
        layers += [nn.Linear(WIDTH, WIDTH), nn.Tanh()]
    return nn.Sequential(*layers, nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1)).double()


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    """With state, so that checkpoints have some."""
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def rows(case: SplitCase, step: int, replica: int) -> Tensor:
    """A replica's batch: three rows a microbatch."""
    generator = torch.Generator().manual_seed(1_000 * case.trial + 10 * step + replica)
    return torch.randn(3 * case.microbatches, 8, generator=generator, dtype=torch.float64)


@dataclass
class Reference:
    """What plain PyTorch computes.

    Attributes:
        losses: by replica and step, the mean over its microbatches.
        states: the model's state dict after each step.
    """

    losses: list[list[float]]
    states: list[dict[str, Tensor]]


def plain_training(case: SplitCase) -> Reference:
    """Train in this process: microbatches one after the other, replicas averaged."""
    model = make_model(case)
    optimizer = make_optimizer(model)
    found = Reference([[] for _ in range(case.replicas)], [])
    for step in range(STEPS):
        optimizer.zero_grad()
        totals = [torch.zeros_like(parameter) for parameter in model.parameters()]
        for replica in range(case.replicas):
            found.losses[replica].append(_gradients(case, model, step, replica))
            for total, parameter in zip(totals, model.parameters(), strict=True):
                assert parameter.grad is not None
                total += parameter.grad / case.replicas
                parameter.grad = None
        for total, parameter in zip(totals, model.parameters(), strict=True):
            parameter.grad = total
        optimizer.step()
        found.states.append({name: tensor.clone() for name, tensor in model.state_dict().items()})
    return found


def _gradients(case: SplitCase, model: nn.Module, step: int, replica: int) -> float:
    losses = []
    for part in rows(case, step, replica).chunk(case.microbatches):
        loss = model(part).square().mean()
        (loss / case.microbatches).backward()
        losses.append(loss.detach())
    return float(torch.stack(losses).mean())
