"""What torch builds on its collectives gives over smddp what it gives in one process."""

# mypy: disable-error-code="no-untyped-call, attr-defined, union-attr"
# some of torch's own functions have no annotations, or wider ones than they are documented with
from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.distributed.nn.functional as dist_functional
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import (
    ddp_zero_hook,
    default_hooks,
    post_localSGD_hook,
    powerSGD_hook,
)
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy, fully_shard
from torch.distributed.optim import PostLocalSGDOptimizer, ZeroRedundancyOptimizer
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.nn.parallel import DistributedDataParallel

import smdistributed.modelparallel.torch as smp
from tests.support.debug_wrapper import wrapped
from tests.support.ranks import RankPool, run_once

ROWS, STEPS = 4, 4


def net() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3))


def batch(step: int) -> tuple[Tensor, Tensor]:
    """The whole batch of all ranks."""
    generator = torch.Generator().manual_seed(step)
    rows = ROWS * dist.get_world_size()
    return torch.randn(rows, 6, generator=generator), torch.randn(rows, 3, generator=generator)


def train(model: nn.Module, optimizer: Any, *, whole: bool = False, steps: int = STEPS) -> None:
    """SGD on this rank's rows, or on all of them."""
    rows = slice(None) if whole else slice(ROWS * dist.get_rank(), ROWS * (dist.get_rank() + 1))
    for step in range(steps):
        x, y = batch(step)
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x[rows]), y[rows]).backward()
        optimizer.step()


def plain() -> dict[str, Tensor]:
    model = net()
    train(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), whole=True)
    return model.state_dict()


def assert_like_plain(found: dict[str, Any], tolerance: float = 1e-5) -> None:
    for name, value in plain().items():
        torch.testing.assert_close(found[name], value, rtol=tolerance, atol=tolerance)


def assert_equal_on_all_ranks(model: nn.Module) -> None:
    flat = nn.utils.parameters_to_vector(model.parameters()).detach()
    everyones = [torch.empty_like(flat) for _ in range(dist.get_world_size())]
    dist.all_gather(everyones, flat)
    assert all(torch.equal(everyone, flat) for everyone in everyones) and flat.isfinite().all()


def sgd(model: nn.Module) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def ddp_with_powersgd() -> None:
    model = net()
    wrapped = DistributedDataParallel(model, bucket_cap_mb=1e-4)  # several, whose sums take turns
    state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=1, start_powerSGD_iter=2)
    wrapped.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    train(wrapped, sgd(model))
    assert_equal_on_all_ranks(model)


def ddp_whose_hook_pads_its_bucket() -> None:
    model = net()
    wrapped = DistributedDataParallel(model)

    def padded(_: None, bucket: Any) -> Any:
        buffer, numbers = bucket.buffer(), bucket.buffer().numel()
        buffer.resize_(numbers + 100)[numbers:] = 0
        work = dist.all_reduce(buffer.div_(dist.get_world_size()), async_op=True)
        return work.get_future().then(lambda done: done.value()[0].resize_(numbers))

    padded.__annotations__.clear()  # torch compares them with its own types
    wrapped.register_comm_hook(None, padded)
    train(wrapped, sgd(model))
    assert_like_plain(model.state_dict())


def ddp_with_post_local_sgd() -> None:
    model = net()
    wrapped = DistributedDataParallel(model)
    alone, _ = dist.new_subgroups(group_size=1)
    state = post_localSGD_hook.PostLocalSGDState(process_group=None, subgroup=alone, start_localSGD_iter=2)
    wrapped.register_comm_hook(state, post_localSGD_hook.post_localSGD_hook)
    averager = PeriodicModelAverager(period=2, warmup_steps=1)
    train(wrapped, PostLocalSGDOptimizer(sgd(model), averager), steps=6)
    averager.average_parameters(model.parameters())
    dist.barrier()
    assert all(parameter.isfinite().all() for parameter in model.parameters())


def ddp_whose_hook_steps_a_sharded_optimizer() -> None:
    model = net()
    wrapped = DistributedDataParallel(model, static_graph=True, bucket_cap_mb=1e-4)
    optimizer = ZeroRedundancyOptimizer(wrapped.parameters(), torch.optim.SGD, lr=0.1, overlap_with_ddp=True)
    hook = ddp_zero_hook.hook_with_zero_step(default_hooks.allreduce_hook, wrapped, optimizer)
    wrapped.register_comm_hook(None, hook)
    train(wrapped, optimizer)
    assert_equal_on_all_ranks(model)


def fully_sharded_data_parallel_of_old() -> None:
    for strategy in (ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP):
        model = FullyShardedDataParallel(
            net(), sharding_strategy=strategy, device_id=torch.device("cpu"), use_orig_params=True
        )
        train(model, sgd(model))
        with FullyShardedDataParallel.summon_full_params(model):
            assert_like_plain({name: value.clone() for name, value in model.module.state_dict().items()})


def distributed_checkpoints(folder: str) -> None:
    model = net()
    fully_shard(model)
    optimizer = sgd(model)
    train(model, optimizer)
    weights, moments = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": moments}, checkpoint_id=f"{folder}/now")
    dcp.async_save({"model": weights}, checkpoint_id=f"{folder}/later").result()
    for name in ("now", "later"):
        found = {"model": net().state_dict()}  # whole, where shards were saved
        dcp.load(found, checkpoint_id=f"{folder}/{name}")
        assert_like_plain(found["model"])
    other = net()
    fully_shard(other)
    other_optimizer = sgd(other)
    weights, moments = get_state_dict(other, other_optimizer)
    dcp.load({"model": weights, "optimizer": moments}, checkpoint_id=f"{folder}/now")
    set_state_dict(other, other_optimizer, model_state_dict=weights, optim_state_dict=moments)
    for one, two in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(one.full_tensor(), two.full_tensor())


def torchs_own_pipeline() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    layers = [nn.Linear(8, 8) for _ in range(size)]
    x, y = torch.randn(8, 8), torch.randn(8, 8)
    stage = PipelineStage(layers[rank], rank, size, torch.device("cpu"))
    schedule = Schedule1F1B(stage, 4, loss_fn=nn.functional.mse_loss)
    schedule.step(*([x] if rank == 0 else []), target=y if rank == size - 1 else None)
    whole = nn.Sequential(*layers)
    expected = torch.autograd.grad(nn.functional.mse_loss(whole(x), y), layers[rank].weight)[0]
    torch.testing.assert_close(layers[rank].weight.grad, expected)


def collectives_with_gradients() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    x = torch.full((4,), rank + 1.0, requires_grad=True)

    def gradient(result: Any) -> float:
        x.grad = None
        torch.stack([part.sum() for part in result]).sum().backward()
        assert x.grad is not None
        return float(x.grad[0])

    everyones = [torch.empty(4) for _ in range(size)]
    world = dist.group.WORLD  # torch's own default is the group that existed at import
    assert gradient([dist_functional.all_reduce(x.clone(), group=world)]) == size
    assert gradient(dist_functional.all_gather(x, group=world)) == size
    assert gradient([dist_functional.broadcast(x, 0, group=world)]) == (size if rank == 0 else 0)
    assert gradient(dist_functional.all_to_all(everyones, [x * 2] * size, group=world)) == 2 * size
    assert gradient([dist_functional.reduce_scatter(torch.empty(4), [x.clone()] * size, group=world)]) == size


def batched_messages_in_a_ring_and_to_all() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    for count, tag in itertools.product((10, 300_000), (0, 7)):
        mine = torch.full((count,), float(rank))
        others = {other: torch.empty(count) for other in range(size) if other != rank}
        calls = [dist.P2POp(dist.isend, mine, other, tag=tag) for other in others]
        calls += [dist.P2POp(dist.irecv, into, key, tag=tag) for key, into in others.items()]
        for work in dist.batch_isend_irecv(calls):
            work.wait()
        assert all(bool((into == key).all()) for key, into in others.items())


FEATURES = [
    ddp_with_powersgd,
    ddp_whose_hook_pads_its_bucket,
    ddp_with_post_local_sgd,
    ddp_whose_hook_steps_a_sharded_optimizer,
    fully_sharded_data_parallel_of_old,
    torchs_own_pipeline,
    collectives_with_gradients,
    batched_messages_in_a_ring_and_to_all,
]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("feature", FEATURES, ids=lambda each: each.__name__)
def test_torch_features_work_over_smddp(pool: Callable[[int], RankPool], feature: Callable[[], None]) -> None:
    pool(2).run(feature)


def test_sharded_checkpoints_load_into_shards_and_into_a_whole_model(
    pool: Callable[[int], RankPool], tmp_path: Path
) -> None:
    pool(2).run(distributed_checkpoints, str(tmp_path))


def run_split_model() -> float:
    smp.init({"partitions": 2, "microbatches": 2})
    torch.manual_seed(0)
    model = smp.DistributedModel(nn.Sequential(*[nn.Linear(4, 4) for _ in range(4)]))
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))

    @smp.step
    def step(inputs: Tensor) -> Tensor:
        loss = model(inputs).square().mean()
        model.backward(loss)
        return loss

    for _ in range(2):
        optimizer.zero_grad()
        loss = step(torch.ones(4, 4))
        optimizer.step()
    return float(loss.reduce_mean())


def test_a_split_model_trains_alike_inside_torchs_debug_wrapper() -> None:
    losses = []
    for outcomes in (run_once(2, run_split_model), run_once(2, wrapped, run_split_model, backend=None)):
        assert [outcome.kind for outcome in outcomes] == ["value", "value"], outcomes[0].text
        losses += [outcome.value for outcome in outcomes]
    assert len(set(losses)) == 1
