"""FSDP of both generations, DTensor and device memory of NCCL's, with CUDA models over smddp."""

# mypy: disable-error-code="no-untyped-call, attr-defined"
# some of torch's own functions have no annotations
from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    CPUOffload,
    CPUOffloadPolicy,
    FullyShardedDataParallel,
    MixedPrecision,
    MixedPrecisionPolicy,
    ShardingStrategy,
    fully_shard,
)
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from tests.support.cuda import DEVICE, MAPPED, CudaRanks
from tests.support.tried import tried

Gpus = Callable[[int], CudaRanks]
STEPS, ROWS = 3, 4


def make_model() -> nn.Sequential:
    torch.manual_seed(1)
    layers = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 2))
    return layers.to(DEVICE)


def data(rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(2)
    return torch.randn(STEPS, rows, 6).to(DEVICE), torch.randn(STEPS, rows, 2).to(DEVICE)


def train(
    model: nn.Module,
    inputs: torch.Tensor,
    targets: torch.Tensor,
    clip: Callable[[], object] = lambda: None,
) -> torch.optim.Optimizer:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    for step in range(STEPS):
        nn.functional.mse_loss(model(inputs[step]).float(), targets[step]).backward()
        clip()
        optimizer.step()
        optimizer.zero_grad()
    return optimizer


def train_own_rows(model: nn.Module, place: int, replicas: int, **options: Any) -> torch.optim.Optimizer:
    inputs, targets = data(replicas * ROWS)
    mine = slice(place * ROWS, (place + 1) * ROWS)
    return train(model, inputs[:, mine], targets[:, mine], **options)


def assert_like_one_process(sharded: nn.Module, replicas: int, tolerance: float = 1e-4) -> None:
    alone = make_model()
    train(alone, *data(replicas * ROWS))
    assert_same_parameters(sharded, alone, tolerance)


def assert_same_parameters(sharded: nn.Module, alone: nn.Module, tolerance: float = 1e-4) -> None:
    for (name, expected), got in zip(alone.named_parameters(), sharded.parameters(), strict=True):
        whole = got.full_tensor() if isinstance(got, DTensor) else got
        torch.testing.assert_close(
            whole.to(DEVICE), expected, rtol=tolerance, atol=tolerance, msg=lambda m, n=name: f"{n}: {m}"
        )


def shard(model: nn.Module, **options: Any) -> Iterator[nn.Module]:
    """Each layer and the whole; the layers."""
    for layer in model.children():
        if isinstance(layer, nn.Linear):
            yield fully_shard(layer, **options)
    fully_shard(model, **options)


def fully_sharded() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    for options, tolerance in (
        ({}, 1e-4),
        ({"reshard_after_forward": False}, 1e-4),
        ({"mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32)}, 0.15),
    ):
        model = make_model()
        list(shard(model, **options))
        train_own_rows(model, rank, size)
        assert_like_one_process(model, size, tolerance)


def fully_sharded_with_memory_of_the_group() -> None:
    """Before the ranks are connected and after: NCCL gives memory only then, if it does at all."""
    group = dist.new_group()
    mesh = DeviceMesh.from_group(group, DEVICE)
    for _ in range(2):
        model = make_model()
        for layer in shard(model, mesh=mesh):
            layer.set_allocate_memory_from_process_group_for_comm(True)
        train_own_rows(model, dist.get_rank(), dist.get_world_size())
        assert_like_one_process(model, dist.get_world_size())
    dist.destroy_process_group(group)


def fully_sharded_in_memory_of_the_host() -> None:
    """Norms of gradients are then summed on the CPU, in a mesh of CUDA."""
    rank, size = dist.get_rank(), dist.get_world_size()
    model = make_model()
    list(shard(model, offload_policy=CPUOffloadPolicy(pin_memory=not MAPPED)))

    def clip() -> None:
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        assert norm.full_tensor().device.type == "cpu"

    train_own_rows(model, rank, size, clip=clip)
    assert all(parameter.device.type == "cpu" for parameter in model.parameters())
    alone = make_model()
    train(alone, *data(size * ROWS), clip=lambda: nn.utils.clip_grad_norm_(alone.parameters(), 0.05))
    assert_same_parameters(model, alone)


def checkpoints_of_shards(folder: str) -> None:
    model = make_model()
    list(shard(model))
    optimizer = train_own_rows(model, dist.get_rank(), dist.get_world_size())
    weights, moments = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": moments}, checkpoint_id=f"{folder}/now")
    dcp.async_save({"model": weights}, checkpoint_id=f"{folder}/later").result()
    whole = {"model": copy.deepcopy(make_model().state_dict())}
    dcp.load(whole, checkpoint_id=f"{folder}/later")
    other = make_model()
    list(shard(other))
    other_optimizer = torch.optim.AdamW(other.parameters(), lr=0.05)
    weights, moments = get_state_dict(other, other_optimizer)
    dcp.load({"model": weights, "optimizer": moments}, checkpoint_id=f"{folder}/now")
    set_state_dict(other, other_optimizer, model_state_dict=weights, optim_state_dict=moments)
    for (name, one), two in zip(model.named_parameters(), other.parameters(), strict=True):
        assert torch.equal(one.full_tensor(), two.full_tensor())
        assert torch.equal(one.full_tensor(), whole["model"][name])


def fully_sharded_of_old() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    bf16 = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for strategy, options, tolerance in (
        (ShardingStrategy.FULL_SHARD, {}, 1e-4),
        (ShardingStrategy.SHARD_GRAD_OP, {"mixed_precision": bf16}, 0.15),
        (ShardingStrategy.NO_SHARD, {}, 1e-4),
        (ShardingStrategy.FULL_SHARD, {"cpu_offload": CPUOffload(offload_params=True)}, 1e-4),
    ):
        model = FullyShardedDataParallel(
            make_model(),
            sharding_strategy=strategy,
            device_id=torch.device(DEVICE, torch.cuda.current_device())
            if not MAPPED
            else torch.device("cpu"),
            use_orig_params=True,
            **options,
        )
        train_own_rows(model, rank, size)
        with FullyShardedDataParallel.summon_full_params(model):
            assert_like_one_process(model, size, tolerance)


def distributed_tensors() -> None:
    size = dist.get_world_size()
    mesh = init_device_mesh("cuda", (size,))
    whole = torch.arange(float(size * 6 + 1), device=DEVICE).reshape(-1, 1)
    sharded = distribute_tensor(whole, mesh, [Shard(0)])
    torch.testing.assert_close(sharded.full_tensor(), whole)
    torch.testing.assert_close((sharded * 2).redistribute(mesh, [Replicate()]).to_local(), whole * 2)
    torch.testing.assert_close(sharded.sum().full_tensor(), whole.sum())
    square = torch.randn(4 * size, 4 * size, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    rows = distribute_tensor(square, mesh, [Shard(0)])
    torch.testing.assert_close(rows.redistribute(mesh, [Shard(1)]).full_tensor(), square)
    torch.testing.assert_close((rows @ rows).full_tensor(), square @ square)


def tensor_parallel_in_shards_and_copies() -> list[str]:
    return tried([two_dimensions, copies_of_shards])


def two_dimensions() -> None:
    """Tensor parallelism of two, and shards over the replicas, on a mesh of two by two."""
    mesh = init_device_mesh("cuda", (2, 2), mesh_dim_names=("replica", "tensor"))
    model = make_model()
    plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    parallelize_module(model, mesh["tensor"], plan)
    fully_shard(model, mesh=mesh["replica"])
    train_own_rows(model, mesh["replica"].get_local_rank(), 2)
    assert_like_one_process(model, 2, 1e-4)


def copies_of_shards() -> None:
    """HSDP: shards within pairs, which hold the same."""
    mesh = init_device_mesh("cuda", (2, 2), mesh_dim_names=("copies", "shards"))
    model = make_model()
    list(shard(model, mesh=mesh))
    train_own_rows(model, dist.get_rank(), 4)
    assert_like_one_process(model, 4)


def memory_of_nccl() -> None:
    """Pools that are NCCL's own, for whoever asks by the backend's methods."""
    assert dist.group.WORLD is not None
    backend: Any = dist.group.WORLD._get_backend(torch.device(DEVICE))
    device = torch.device("cuda", torch.cuda.current_device())
    dist.all_reduce(torch.ones(1, device=device))
    if not backend.supports_tensor_alloc(torch.device("cuda")):  # as torch answers on GPUs without multicast
        assert not backend.supports_tensor_alloc(device)
        return
    tensor = backend.allocate_tensor(1000, dtype=torch.float32, device=device)
    dist.all_reduce(tensor.fill_(1.0))
    assert bool((tensor == dist.get_world_size()).all())
    del tensor
    pool = torch.cuda.MemPool(backend.mem_allocator)
    with torch.cuda.use_mem_pool(pool):
        tensor = torch.ones(1 << 20, device=device)
    backend.register_mem_pool(pool)
    dist.all_reduce(tensor)
    torch.cuda.synchronize()
    assert bool((tensor == dist.get_world_size()).all())
    backend.deregister_mem_pool(pool)
    del tensor, pool


CHECKS = [
    fully_sharded,
    fully_sharded_in_memory_of_the_host,
    fully_sharded_of_old,
    distributed_tensors,
]


def test_sharded_cuda_models_train_like_one_process(gpus: Gpus) -> None:
    for failures in gpus(2).run(tried, CHECKS, timeout=90, group_timeout=30):
        assert not failures, "\n".join(failures)


def test_checkpoints_of_sharded_cuda_models_load_into_shards_and_whole_models(
    gpus: Gpus, tmp_path: Any
) -> None:
    gpus(2).run(checkpoints_of_shards, str(tmp_path), timeout=60, group_timeout=30)


def test_meshes_of_two_dimensions_train_like_one_process(gpus: Gpus) -> None:
    for failures in gpus(4).run(tensor_parallel_in_shards_and_copies, timeout=120, group_timeout=60):
        assert not failures, "\n".join(failures)


def test_shards_are_gathered_in_memory_of_the_group(gpus: Gpus) -> None:
    gpus(2).run(fully_sharded_with_memory_of_the_group, timeout=60, group_timeout=30)


@pytest.mark.skipif(MAPPED, reason="the CPU has no pools")
def test_memory_of_nccl_is_given_out_and_registered(gpus: Gpus) -> None:
    gpus(2).run(memory_of_nccl, timeout=60, group_timeout=30)
