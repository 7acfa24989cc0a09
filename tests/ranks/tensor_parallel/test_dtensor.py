"""Modules that torch's own parallelize_module has split train inside stages as the plain ones."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional as F

import smdistributed.modelparallel.torch as smp
from opensmd.modelparallel.exceptions import SMPError
from tests.support.partitioned import restart
from tests.support.ranks import describe, run_once

WIDTH, STEPS = 8, 2


def make() -> nn.Sequential:
    torch.manual_seed(2)
    blocks = [
        nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.Tanh(), nn.Linear(2 * WIDTH, WIDTH)) for _ in range(3)
    ]
    return nn.Sequential(*blocks, nn.Linear(WIDTH, 1))


def split_by_torch(module: nn.Sequential) -> None:
    mesh = DeviceMesh.from_group(smp.get_tp_process_group(), "cpu")
    for block in module[:3]:
        parallelize_module(block, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})


def data(step: int) -> tuple[Tensor, Tensor]:
    x = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(step))
    return x, x.sin().sum(1, keepdim=True)


def train(stages: int, by_hand: bool) -> None:
    plain = make()
    reference = torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9)
    wanted = []
    for step in range(STEPS):
        x, y = data(step)
        reference.zero_grad()
        loss = F.mse_loss(plain(x), y)
        loss.backward()
        norm = float(nn.utils.clip_grad_norm_(plain.parameters(), 0.5))
        reference.step()
        wanted.append([loss.item(), norm])

    restart(
        partitions=stages,
        microbatches=2,
        tensor_parallel_degree=2,
        ddp=True,
        prescaled_batch=True,
        auto_partition=not by_hand,
        default_partition=0,
    )
    module = make()
    split_by_torch(module)
    for block in module[2:] if by_hand else ():
        smp.set_partition(block, 1)
    model = smp.DistributedModel(module)
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))

    @smp.step
    def step_function(x: Tensor, y: Tensor) -> Tensor:
        loss = F.mse_loss(model(x), y)
        model.backward(loss)
        return loss

    found = []
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = step_function(*data(step)).reduce_mean()
        norm = optimizer.clip_master_grads(0.5)
        optimizer.step()
        found.append([loss.item(), norm])
    torch.testing.assert_close(found, wanted, rtol=2e-6, atol=0.0)
    local = [name for name, parameter in model.local_named_parameters() if isinstance(parameter, DTensor)]
    assert local and all(model.is_scaled_batch_parameter(module.get_parameter(name)) for name in local)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    for name, value in plain.state_dict().items():
        assert not isinstance(state[name], DTensor)
        torch.testing.assert_close(state[name], value, rtol=1e-5, atol=1e-7, msg=name)
    model.load_state_dict({name: value + 1 for name, value in state.items()})
    again = model.state_dict()
    assert all(again[name].equal(value + 1) for name, value in state.items())


def cut_inside(message: str) -> None:
    restart(partitions=2, tensor_parallel_degree=2, ddp=True, prescaled_batch=True)
    module = make()
    split_by_torch(module)
    smp.set_partition(module[0], 0)
    smp.set_partition(module[0][2], 1)
    model = smp.DistributedModel(module)
    first = smp.pp_rank() == 0  # what torch's hook says of a placeholder is on the others
    with pytest.raises(SMPError if first else AttributeError, match=message if first else "Placeholder"):
        smp.step(lambda x: model(x))(data(0)[0])


@pytest.mark.parametrize(
    ("size", "stages", "by_hand"),
    [(2, 1, False), (4, 2, False), pytest.param(4, 2, True, marks=pytest.mark.newest)],
)
def test_a_plan_of_torchs_own_trains_in_one_stage_and_in_two(size: int, stages: int, by_hand: bool) -> None:
    """In processes of their own: torch keeps a mesh's groups for all equal meshes that come later."""
    outcomes = run_once(size, train, stages, by_hand)
    assert [outcome.kind for outcome in outcomes] == ["value"] * size, describe(train, outcomes)


def test_a_block_that_is_cut_where_distributed_tensors_go_says_what_to_do() -> None:
    outcomes = run_once(4, cut_inside, "DTensors do not go between stages")
    assert [outcome.kind for outcome in outcomes] == ["value"] * 4, describe(cut_inside, outcomes)
