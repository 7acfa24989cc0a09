"""The wrappers of ``torch.nn.parallel.deprecated``: as one process with the whole batch."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed.deprecated as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel.deprecated import DistributedDataParallel, DistributedDataParallelCPU
from torch.nn.parallel.deprecated.distributed import DistributedDataParallel as from_file
from torch.nn.parallel.deprecated.distributed_cpu import DistributedDataParallelCPU as cpu_from_file

from opensmd.launch.mapped_cuda import cuda_on_cpu
from tests.support.patience import PATIENCE
from tests.support.ports import free_port
from tests.support.ranks import RankPool

BATCH, FEATURES = 12, 6


class Net(nn.Module):
    """Two dtypes, a buffer, a branch that some processes skip, a parameter that nobody uses."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(FEATURES, 300)
        self.norm = nn.BatchNorm1d(300, track_running_stats=True)
        self.second = nn.Linear(300, 1).double()
        self.sometimes = nn.Linear(1, 1).double()
        self.unused = nn.Parameter(torch.ones(3))

    def forward(self, inputs: torch.Tensor, branch: bool) -> torch.Tensor:
        hidden = torch.tanh(self.first(inputs)).double()
        outputs = self.second(hidden)
        return outputs + self.sometimes(outputs) if branch else outputs


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(BATCH, FEATURES, generator=generator), torch.randn(
        BATCH, 1, generator=generator
    ).double()


def losses(
    model: nn.Module, inputs: torch.Tensor, targets: torch.Tensor, branches: list[bool]
) -> torch.Tensor:
    """The mean of the parts' losses, each part with its own branch."""
    parts = zip(inputs.chunk(len(branches)), targets.chunk(len(branches)), branches, strict=True)
    return torch.stack([F.mse_loss(model(x, branch), y) for x, y, branch in parts]).mean()


def train_both_ways(kind: str, port: int, world_size: int) -> None:
    os.environ.update(OPENSMD_LEGACY_ENGINE="smddp", OPENSMD_LEGACY_TIMEOUT=str(PATIENCE))
    rank = int(os.environ["RANK"])
    dist.init_process_group("gloo", f"tcp://127.0.0.1:{port}", rank=rank, world_size=world_size)
    torch.manual_seed(rank)
    own = Net()
    own.norm.running_mean.fill_(float(rank))
    torch.manual_seed(0)
    reference = Net()
    uneven = kind == "ddp"  # the CPU wrapper needs the same parameters on all processes
    model = DistributedDataParallel(own) if uneven else DistributedDataParallelCPU(own)
    assert own.norm.running_mean[0].item() == (0.0 if uneven else rank)
    ours = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    theirs = torch.optim.SGD(reference.parameters(), lr=0.05, momentum=0.9)
    for step in range(4):
        inputs, targets = batch(step)
        branches = [not uneven or (step + other) % 2 == 0 for other in range(world_size)]
        ours.zero_grad()
        theirs.zero_grad()
        with torch.no_grad():
            model(inputs, True)  # an evaluation in between changes nothing
        F.mse_loss(
            model(inputs.chunk(world_size)[rank], branches[rank]), targets.chunk(world_size)[rank]
        ).backward()
        losses(reference, inputs, targets, branches).backward()
        for (name, mine), want in zip(own.named_parameters(), reference.parameters(), strict=True):
            if want.grad is None:
                assert mine.grad is None, name
            else:
                torch.testing.assert_close(mine.grad, want.grad, msg=f"{name} in step {step}")
        ours.step()
        theirs.step()
    # without a forward pass of the wrapper, gradients stay local
    ours.zero_grad()
    (own.unused.sum() * (rank + 1)).backward()
    assert own.unused.grad is not None and own.unused.grad[0].item() == rank + 1
    assert list(copy.copy(model).state_dict()) == ["module." + name for name in reference.state_dict()]
    dist.destroy_process_group()


def test_ddp_trains_as_one_process_with_the_whole_batch(pool: Callable[[int], RankPool]) -> None:
    for world_size in (2, 3):
        pool(world_size).run(train_both_ways, "ddp", free_port(), world_size, backend=None)


def test_ddp_cpu_trains_as_one_process_with_the_whole_batch(pool: Callable[[int], RankPool]) -> None:
    for world_size in (2, 3):
        pool(world_size).run(train_both_ways, "cpu", free_port(), world_size, backend=None)


class Fails(torch.autograd.Function):
    """Passes its input on; its backward fails where it is told to."""

    @staticmethod
    def forward(ctx: Any, inputs: torch.Tensor, fails: bool) -> torch.Tensor:
        ctx.fails = fails
        return inputs.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        if ctx.fails:
            raise RuntimeError("this batch is too large")
        return gradient, None


class FailsInTheMiddle(nn.Module):
    """The second layer has its gradient when backward fails; a large one, in another bucket, is unused."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(1, 1)
        self.second = nn.Linear(1, 1)
        self.unused = nn.Linear(600, 600)

    def forward(self, inputs: torch.Tensor, fails: bool) -> torch.Tensor:
        hidden: torch.Tensor = Fails.apply(self.first(inputs), fails)
        out: torch.Tensor = self.second(hidden)
        return out.sum()


def train_after_a_failed_backward(port: int) -> None:
    rank = int(os.environ["RANK"])
    dist.init_process_group("gloo", f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    for wrapper in (DistributedDataParallel, DistributedDataParallelCPU):
        model = wrapper(FailsInTheMiddle())
        inputs = torch.full((1, 1), float(rank))
        with pytest.raises(RuntimeError, match="too large"):
            model(inputs, True).backward()
        model.zero_grad()
        model(inputs, False).backward()
        first, second = model.module.first, model.module.second
        # the mean over the inputs 0 and 1
        torch.testing.assert_close(first.weight.grad, 0.5 * second.weight.detach())
    dist.destroy_process_group()


def test_gradients_are_averaged_after_a_backward_that_failed(pool: Callable[[int], RankPool]) -> None:
    pool(2).run(train_after_a_failed_backward, free_port(), backend=None)


def wrapped_under_device_cpu(port: int) -> None:
    cuda_on_cpu.install()
    try:
        rank = int(os.environ["RANK"])
        dist.init_process_group("gloo", f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
        model = DistributedDataParallel(nn.Linear(2, 1).cuda(), device_ids=[rank], output_device=rank)
        model(torch.full((1, 2), float(rank)).cuda()).sum().backward()
        assert model.module.weight.grad.tolist() == [[0.5, 0.5]]
        dist.destroy_process_group()
    finally:
        cuda_on_cpu.uninstall()


def test_ddp_of_a_script_that_hard_codes_cuda_runs_on_the_cpu(pool: Callable[[int], RankPool]) -> None:
    pool(2).run(wrapped_under_device_cpu, free_port(), backend=None)


def test_the_wrappers_are_found_in_the_files_of_torch_1_0() -> None:
    assert from_file is DistributedDataParallel
    assert cpu_from_file is DistributedDataParallelCPU
