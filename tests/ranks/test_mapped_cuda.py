"""Scripts that hard-code CUDA, on the CPU: what they shard trains over smddp as in one process."""

# mypy: disable-error-code="no-untyped-call"
# some of torch's own functions have no annotations
from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffload, FullyShardedDataParallel

from opensmd.launch.mapped_cuda import cuda_on_cpu
from tests.support.ranks import RankPool

SIZE = 2


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))


def trained(model: nn.Module, rows: slice) -> nn.Module:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        x = torch.randn(4, 4, generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        model(x[rows].cuda()).square().mean().backward()
        optimizer.step()
    return model


def sharded_on_cuda() -> None:
    cuda_on_cpu.install()
    try:
        dist.init_process_group("nccl")
        rank = dist.get_rank()
        mine = slice(2 * rank, 2 * rank + 2)
        expected = trained(network(), slice(None)).state_dict()
        for model in (
            FullyShardedDataParallel(network(), device_id=torch.cuda.current_device()),
            FullyShardedDataParallel(network().cuda(), None, sync_module_states=True),
            FullyShardedDataParallel(network().to(rank), cpu_offload=CPUOffload(offload_params=True)),
        ):
            torch.testing.assert_close(trained(model, mine).state_dict(), expected)
        dist.destroy_process_group()
    finally:
        cuda_on_cpu.uninstall()


@pytest.mark.newest
@pytest.mark.filterwarnings("ignore")
def test_models_are_sharded_whatever_device_the_script_names(pool: Callable[[int], RankPool]) -> None:
    pool(SIZE).run(sharded_on_cuda, backend=None)


def meshes_of_cuda() -> None:
    cuda_on_cpu.install()
    try:
        mesh = init_device_mesh(device_type="cuda", mesh_shape=(SIZE,))  # makes the group, too
        assert dist.get_backend() == "smddp"
        other = DeviceMesh("cuda", list(range(SIZE)))
        again = DeviceMesh.from_group(dist.group.WORLD, "cuda")
        assert mesh.device_type == other.device_type == again.device_type == "cpu"
        total = torch.ones(1, device="cuda")
        dist.all_reduce(total, group=other.get_group())
        assert total.item() == SIZE
        dist.destroy_process_group()
    finally:
        cuda_on_cpu.uninstall()


def test_meshes_of_cuda_are_meshes_of_the_cpu(pool: Callable[[int], RankPool]) -> None:
    pool(SIZE).run(meshes_of_cuda, backend=None)
