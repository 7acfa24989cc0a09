"""Scripts that hard-code CUDA, on the CPU: what they shard trains over smddp as in one process."""

# mypy: disable-error-code="no-untyped-call"
# some of torch's own functions have no annotations
from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import checkpoint
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffload, FullStateDictConfig, FullyShardedDataParallel, StateDictType
from torch.nn.parallel.distributed import _MixedPrecision

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


def taken_to_the_cpu(model: FullyShardedDataParallel) -> None:
    """Scripts save what they shard in this way, and need it on rank 0 alone."""
    config = FullStateDictConfig(offload_to_cpu=True, rank0_only=True)
    with FullyShardedDataParallel.state_dict_type(model, StateDictType.FULL_STATE_DICT, config):
        saved = model.state_dict()
    expected = network().state_dict()
    torch.testing.assert_close(saved, expected if dist.get_rank() == 0 else {})
    whole = FullyShardedDataParallel.summon_full_params
    with whole(model, writeback=False, offload_to_cpu=True, rank0_only=True):
        if dist.get_rank() == 0:
            assert sum(parameter.sum() for parameter in model.parameters()) == sum(
                tensor.sum() for tensor in expected.values()
            )
    torch.testing.assert_close(model.state_dict(), expected)


def saved_in_parts(folder: str) -> None:
    """Rank 1 has no part of the weight."""
    saved, loaded = (FullyShardedDataParallel(nn.Linear(3, 1).cuda()) for _ in range(2))
    with FullyShardedDataParallel.state_dict_type(saved, StateDictType.SHARDED_STATE_DICT):
        state = saved.state_dict()
        assert state["weight"].device == torch.device("cpu")
        checkpoint.save(state, checkpoint_id=folder)
        state["weight"].gather(0, torch.empty(1, 3) if dist.get_rank() == 0 else None)
    with FullyShardedDataParallel.state_dict_type(loaded, StateDictType.SHARDED_STATE_DICT):
        state = loaded.state_dict()
        checkpoint.load(state, checkpoint_id=folder)
        loaded.load_state_dict(state)
    torch.testing.assert_close(loaded.state_dict(), saved.state_dict())


def sharded_on_cuda(folder: str) -> None:
    cuda_on_cpu.install()
    try:
        dist.init_process_group("nccl")
        rank = dist.get_rank()
        mine = slice(2 * rank, 2 * rank + 2)
        expected = trained(network(), slice(None)).state_dict()
        for options in ({}, {"use_orig_params": True}):
            taken_to_the_cpu(FullyShardedDataParallel(network(), **options))
        saved_in_parts(folder)
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
def test_models_are_sharded_whatever_device_the_script_names(
    pool: Callable[[int], RankPool], tmp_path: Path
) -> None:
    pool(SIZE).run(sharded_on_cuda, str(tmp_path), backend=None)


def trained_in_16_bits() -> None:
    cuda_on_cpu.install()
    try:
        dist.init_process_group("nccl")
        rank = dist.get_rank()
        bits = _MixedPrecision(*[torch.bfloat16] * 3)
        model = nn.parallel.DistributedDataParallel(network().cuda(), device_ids=[rank], mixed_precision=bits)
        # torch itself loses the gradients of the first backward, over Gloo, too
        model(torch.ones(2, 4).cuda()).sum().backward()
        trained(model, slice(2 * rank, 2 * rank + 2))
        expected = trained(network(), slice(None))
        for own, wanted in zip(model.parameters(), expected.parameters(), strict=True):
            assert own.dtype == torch.float32
            torch.testing.assert_close(own, wanted, rtol=0.0, atol=0.005)
            both = [torch.empty_like(own) for _ in range(SIZE)]
            dist.all_gather(both, own.detach())
            assert torch.equal(*both)
        dist.destroy_process_group()
    finally:
        cuda_on_cpu.uninstall()


@pytest.mark.newest
def test_ddp_trains_in_16_bits_with_the_streams_that_it_takes_for_granted(
    pool: Callable[[int], RankPool],
) -> None:
    pool(SIZE).run(trained_in_16_bits, backend=None)


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


PARTS = (slice(0, 3), slice(3, 8), slice(8, 8))  # of the rows; the third rank has none


def normalized(dtype: torch.dtype, momentum: float | None) -> nn.Sequential:
    torch.manual_seed(0)
    layers = (nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4, momentum=momentum), nn.BatchNorm2d(4, affine=False))
    return nn.Sequential(*layers).to(dtype)


def in_steps(model: nn.Module, mine: slice, dtype: torch.dtype, weight: float) -> dict[str, torch.Tensor]:
    """What is in ``model`` after it has trained and then been asked, and what it answers for all rows."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        rows = torch.randn(8, 2, 5, 5, dtype=dtype, generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        (model(rows[mine].cuda() * 2 + 5).square() * rows[mine][:, :1, :3, :3]).sum().mul(weight).backward()
        optimizer.step()
    module = getattr(model, "module", model)
    return module.state_dict() | {"answer": module.eval()(rows)}


def normalized_together() -> None:
    cuda_on_cpu.install()
    try:
        dist.init_process_group("nccl")
        mine, size = PARTS[dist.get_rank()], dist.get_world_size()
        for dtype, momentum in ((torch.float64, 0.1), (torch.float32, 0.3), (torch.float64, None)):
            expected = in_steps(normalized(dtype, momentum), slice(0, 8), dtype, 0.01)
            model = nn.SyncBatchNorm.convert_sync_batchnorm(normalized(dtype, momentum)).cuda()
            wrapped = nn.parallel.DistributedDataParallel(model, device_ids=[torch.cuda.current_device()])
            torch.testing.assert_close(in_steps(wrapped, mine, dtype, 0.01 * size), expected)
        alone = nn.SyncBatchNorm(
            4, process_group=[dist.new_group([rank]) for rank in range(size)][dist.get_rank()]
        )
        assert not torch.equal(alone(torch.randn(2, 4)), torch.zeros(2, 4))
        with pytest.raises(ValueError, match="at least 2D input"):
            nn.SyncBatchNorm(4)(input=torch.randn(4))
        dist.barrier()  # rank 0 serves the store in which others make groups of their own
        dist.destroy_process_group()
    finally:
        cuda_on_cpu.uninstall()


@pytest.mark.parametrize("size", [2, 3])
def test_batches_are_normalized_over_all_ranks(pool: Callable[[int], RankPool], size: int) -> None:
    pool(size).run(normalized_together, backend=None)
