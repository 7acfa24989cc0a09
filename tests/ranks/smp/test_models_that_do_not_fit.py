"""A model of four times what the kernel gives a rank trains on two, and not without what saves memory."""

from __future__ import annotations

import ctypes
import itertools
import resource
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.fsdp  # code, which is not to count
from torch import Tensor, nn

import smdistributed.modelparallel.torch as smp
from smdistributed.modelparallel.torch.sharded_data_parallel_checkpoint import (
    get_full_state_dict_from_sharded_data_parallel_checkpoint,
)
from tests.support.ranks import run_once

MIB = 2**20
M_MMAP_THRESHOLD = -3  # of malloc.h
LIMIT = 110 * MIB  # beyond what the interpreter and its libraries have
WIDTH, BLOCKS, ROWS, STEPS, DEPTH = 384, 12, 512, 2, 18
OF_ADAM = 16  # bytes of a parameter with its gradient and Adam's state
SHARED_OUT = {
    "sharded_data_parallel_degree": 2,
    "sdp_param_persistence_threshold": 0,
    "sdp_max_live_parameters": 1,
    "delayed_parameter_initialization": True,
    "offload_activations": True,
}


class Block(nn.Module):
    """Keeps far more activations than it has parameters, as long texts do."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.up(x)
        for _ in range(DEPTH):
            hidden = torch.relu(hidden)  # keeps its result, and is quickly computed
        result: Tensor = x + self.down(hidden)
        return result


def make() -> nn.Sequential:
    return nn.Sequential(*[Block() for _ in range(BLOCKS)])


def allow(more: int) -> None:
    """Have the kernel refuse this process more than so many bytes of its own beyond today's.

    The C library shall map large blocks one by one, as else what is free between others stays with it. torch
    imports some of itself with the first optimizer, and starts threads with the first backward: both come
    before the limit.
    """
    parameter = nn.Parameter(torch.zeros(1))
    parameter.sum().backward()
    torch.optim.AdamW([parameter]).step()
    ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 128 * 1024)
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    now = int(fields["VmData"].split()[0]) * 1024  # what RLIMIT_DATA counts; the kernel writes kB
    resource.setrlimit(resource.RLIMIT_DATA, (now + more, resource.RLIM_INFINITY))


def trains_within_the_limit(settings: dict[str, Any], folder: str) -> tuple[list[float], float]:
    """Losses, and which part of the model's parameters, gradients and state this rank has; it saves, too."""
    smp.init({"ddp": True, **settings})
    allow(LIMIT)
    torch.manual_seed(0)
    with smp.model_creation():
        net = make()
    model = smp.DistributedModel(net)
    optimizer = smp.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=1e-4))
    for block in model.get_module():
        smp.set_activation_checkpointing(block)

    @smp.step
    def step(x: Tensor) -> Tensor:
        loss = (model(x) - 1).square().mean()
        model.backward(loss)
        return loss

    x = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(smp.rank()))
    losses = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        losses.append(step(x).reduce_mean().item())
        optimizer.step()
    smp.save_checkpoint(folder, "blocking", model=model, optimizer=optimizer)
    parameters = list(model.parameters())
    state = [each for entries in optimizer.state.values() for each in entries.values() if each.dim() > 0]
    gradients = [each.grad for each in parameters]
    held = sum(local(each).nbytes for each in itertools.chain(parameters, gradients, state))
    return losses, held / (OF_ADAM * sum(each.numel() for each in parameters))


def local(tensor: Any) -> Tensor:
    """What this rank has of it."""
    here: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return here


def bytes_in_one_process() -> int:
    """Parameters, gradients, Adam's state and what forward keeps for backward."""
    kept: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    net = make()
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        net(torch.randn(ROWS, WIDTH)).sum()
    weights = {each.data_ptr() for each in net.parameters()}
    kept = {address: size for address, size in kept.items() if address not in weights}
    return OF_ADAM * sum(each.numel() for each in net.parameters()) + sum(kept.values())


@pytest.mark.newest
def test_a_model_of_four_times_a_ranks_memory_trains_on_two_ranks_and_is_saved(tmp_path: Path) -> None:
    assert bytes_in_one_process() >= 4 * LIMIT
    for outcome in run_once(2, trains_within_the_limit, SHARED_OUT, str(tmp_path)):
        assert outcome.kind == "value", outcome.text
        losses, part = outcome.value
        assert losses[-1] < losses[0]
        assert part <= 1.05 / 2
    whole = get_full_state_dict_from_sharded_data_parallel_checkpoint(str(tmp_path))
    assert {name: each.shape for name, each in whole.items()} == {
        name: each.shape for name, each in make().state_dict().items()
    }
    refused = run_once(2, trains_within_the_limit, {}, str(tmp_path))
    assert any("allocate" in outcome.text for outcome in refused), refused
    assert all(outcome.kind == "error" for outcome in refused), refused
