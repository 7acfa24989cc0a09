"""FSDP2, DeviceMesh, functional collectives and torch.compile over smddp."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from tests.support.ranks import RankPool

Pool = Callable[[int], RankPool]
STEPS = 3
ROWS = 4


def make_model() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 15), nn.Tanh(), nn.Linear(15, 15), nn.Tanh(), nn.Linear(15, 2))


def train(model: nn.Module, inputs: torch.Tensor, targets: torch.Tensor) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    for step in range(STEPS):
        nn.functional.mse_loss(model(inputs[step]), targets[step]).backward()
        optimizer.step()
        optimizer.zero_grad()


def data(rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(2)
    return torch.randn(STEPS, rows, 6), torch.randn(STEPS, rows, 2)


def assert_trained_alike(sharded: nn.Module, replicas: int, tolerance: float = 1e-5) -> None:
    alone = make_model()
    inputs, targets = data(replicas * ROWS)
    train(alone, inputs, targets)
    for (name, expected), got in zip(alone.named_parameters(), sharded.parameters(), strict=True):
        whole = got.full_tensor() if isinstance(got, DTensor) else got
        torch.testing.assert_close(
            whole, expected, rtol=tolerance, atol=tolerance, msg=lambda m, n=name: f"{n}: {m}"
        )


def run_fully_shard() -> None:
    size = dist.get_world_size()
    inputs, targets = data(size * ROWS)
    mine = slice(dist.get_rank() * ROWS, (dist.get_rank() + 1) * ROWS)
    for in_arena in (False, True):
        model = make_model()
        for layer in model:
            if isinstance(layer, nn.Linear):
                fully_shard(layer)
                layer.set_allocate_memory_from_process_group_for_comm(in_arena)
        fully_shard(model)
        train(model, inputs[:, mine], targets[:, mine])
        assert_trained_alike(model, size)
    model = make_model()
    fully_shard(model, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32))
    train(model, inputs[:, mine], targets[:, mine])
    assert_trained_alike(model, size, tolerance=0.1)


def run_two_dimensions() -> None:
    """Tensor parallelism of two, and shards over the replicas, on a mesh of two by two."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replica", "tensor"))
    replica = mesh["replica"].get_local_rank()
    plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 2))
    alone = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 2))
    torch.manual_seed(4)
    for one, other in zip(model.parameters(), alone.parameters(), strict=True):
        one.data.copy_(torch.randn_like(one))
        other.data.copy_(one)
    parallelize_module(model, mesh["tensor"], plan)
    fully_shard(model, mesh=mesh["replica"])
    inputs, targets = data(2 * ROWS)
    mine = slice(replica * ROWS, (replica + 1) * ROWS)
    train(model, inputs[:, mine], targets[:, mine])
    train(alone, inputs, targets)
    for got, expected in zip(model.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(got.full_tensor(), expected, rtol=1e-4, atol=1e-5)


def run_device_mesh() -> None:
    size, rank = dist.get_world_size(), dist.get_rank()
    mesh = init_device_mesh("cpu", (size,))
    assert dist.get_backend(mesh.get_group()) == "smddp"
    whole = torch.arange(float(size * 6 + 1)).reshape(-1, 1)
    sharded = distribute_tensor(whole, mesh, [Shard(0)])
    torch.testing.assert_close(sharded.full_tensor(), whole)
    torch.testing.assert_close((sharded * 2).redistribute(mesh, [Replicate()]).to_local(), whole * 2)
    torch.testing.assert_close(sharded.sum().full_tensor(), whole.sum())
    assert mesh.get_coordinate() == [rank] or mesh.get_coordinate() == (rank,)


def run_functional() -> None:
    size, rank = dist.get_world_size(), dist.get_rank()
    group = dist.group.WORLD
    summed = functional.all_reduce(torch.full((3,), float(rank)), "sum", group)
    assert torch.equal(summed + 0, torch.full((3,), float(sum(range(size)))))
    gathered = functional.all_gather_tensor(torch.full((2,), float(rank)), 0, group)
    assert torch.equal(gathered + 0, torch.arange(float(size)).repeat_interleave(2))
    scattered = functional.reduce_scatter_tensor(torch.arange(float(2 * size)), "sum", 0, group)
    assert torch.equal(scattered + 0, torch.tensor([2.0 * rank, 2.0 * rank + 1]) * size)
    several = functional.all_reduce_coalesced([torch.ones(2), torch.ones(3)], "sum", group)
    assert [float(one.sum()) for one in several] == [2.0 * size, 3.0 * size]
    exchanged = functional.all_to_all_single(torch.full((size,), float(rank)), None, None, group)
    assert torch.equal(exchanged + 0, torch.arange(float(size)))


def run_compiled() -> None:
    def step(tensor: torch.Tensor) -> torch.Tensor:
        dist.all_reduce(tensor)
        return tensor * 2

    compiled = torch.compile(step, backend="aot_eager", fullgraph=True)
    got = compiled(torch.full((4,), float(dist.get_rank() + 1)))
    size = dist.get_world_size()
    assert torch.equal(got, torch.full((4,), float(size * (size + 1))))


@pytest.mark.parametrize("world_size", [2, 3])
def test_fully_shard_trains_like_one_process(pool: Pool, world_size: int) -> None:
    pool(world_size).run(run_fully_shard)


def test_a_mesh_of_tensor_and_data_parallelism_trains_like_one_process(pool: Pool) -> None:
    pool(4).run(run_two_dimensions)


def test_device_mesh_and_dtensor_work(pool: Pool) -> None:
    pool(3).run(run_device_mesh)


def test_functional_collectives_work(pool: Pool) -> None:
    pool(3).run(run_functional)


def test_collectives_inside_torch_compile_work(pool: Pool) -> None:
    pool(2).run(run_compiled)
