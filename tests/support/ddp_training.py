"""A model that DistributedDataParallel trains, and one process on the whole batch, on any device."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

__all__ = ["STEPS", "assert_same_on_all_ranks", "compare", "model_and_data", "own_rows"]

STEPS = 4
ROWS_A_RANK = 6


class Branching(nn.Module):
    """Layers, and a branch that even steps do not use."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 16)
        self.often = nn.Linear(16, 16)
        self.last = nn.Linear(16, 3)

    def forward(self, inputs: torch.Tensor, *, branch: bool = True) -> torch.Tensor:
        hidden = torch.tanh(self.first(inputs))
        if branch:
            hidden = torch.tanh(self.often(hidden))
        return self.last(hidden)


def model_and_data(device: str) -> tuple[Branching, torch.Tensor, torch.Tensor]:
    torch.manual_seed(7)
    model = Branching().to(device)
    rows = dist.get_world_size() * ROWS_A_RANK
    return model, torch.randn(STEPS, rows, 5).to(device), torch.randn(STEPS, rows, 3).to(device)


def own_rows(whole: torch.Tensor) -> torch.Tensor:
    return whole[dist.get_rank() * ROWS_A_RANK : (dist.get_rank() + 1) * ROWS_A_RANK]


def train_alone(device: str, *, branches: bool = False, accumulate: int = 1) -> list[torch.Tensor]:
    model, inputs, targets = model_and_data(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(STEPS):
        output = model(inputs[step], branch=not branches or step % 2 == 1)
        nn.functional.mse_loss(output, targets[step]).backward()
        if (step + 1) % accumulate == 0:
            optimizer.step()
            optimizer.zero_grad()
    return [parameter.detach() for parameter in model.parameters()]


def train_together(
    device: str,
    *,
    branches: bool = False,
    accumulate: int = 1,
    hook: tuple[object, Callable[..., Any]] | None = None,
    zero: bool = False,
    group: Any = None,
    **ddp_options: Any,
) -> list[torch.Tensor]:
    model, inputs, targets = model_and_data(device)
    if dist.get_rank() != 0 and ddp_options.get("init_sync", True):
        for parameter in model.parameters():  # DDP must send rank 0's
            nn.init.zeros_(parameter)
    ddp = DistributedDataParallel(model, process_group=group, **ddp_options)
    if hook is not None:
        ddp.register_comm_hook(*hook)
    optimizer: Any = torch.optim.SGD(ddp.parameters(), lr=0.1, momentum=0.9)
    if zero:
        optimizer = ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.SGD, lr=0.1, momentum=0.9)
    for step in range(STEPS):
        last = (step + 1) % accumulate == 0
        with contextlib.nullcontext() if last else ddp.no_sync():
            output = ddp(own_rows(inputs[step]), branch=not branches or step % 2 == 1)
            nn.functional.mse_loss(output, own_rows(targets[step])).backward()
        if last:
            optimizer.step()
            optimizer.zero_grad()
    return [parameter.detach() for parameter in model.parameters()]


def assert_same_on_all_ranks(tensors: list[torch.Tensor]) -> None:
    flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
    everyones = [torch.empty_like(flat) for _ in range(dist.get_world_size())]
    dist.all_gather(everyones, flat)
    for other in everyones:
        assert torch.equal(other.view(torch.int32), flat.view(torch.int32))


def compare(
    alone: dict[str, Any], together: dict[str, Any], tolerance: float = 1e-5, *, device: str = "cpu"
) -> None:
    """Train alone with the options ``alone`` and together with these and ``together``; require the same."""
    expected, got = train_alone(device, **alone), train_together(device, **alone, **together)
    assert_same_on_all_ranks(got)
    for one, other in zip(got, expected, strict=True):
        assert one.device.type == device
        torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance)
