"""DistributedDataParallel of CUDA models over smddp gives what one process gives on the whole batch."""

# mypy: disable-error-code="no-untyped-call, attr-defined"
# some of torch's own functions have no annotations
from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import ddp_zero_hook, default_hooks, powerSGD_hook
from torch.distributed.algorithms.join import Join
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

from tests.ranks.data_parallel.test_ddp import python_chain_hook
from tests.support.cuda import DEVICE, MAPPED, CudaRanks
from tests.support.ddp_training import STEPS, assert_same_on_all_ranks, compare, model_and_data, own_rows
from tests.support.tried import tried

Gpus = Callable[[int], CudaRanks]


# by what a failure is to be called; the second part are a wrapper's options
VARIANTS: dict[str, tuple[dict[str, Any], dict[str, Any], float]] = {
    "plain": ({}, {}, 1e-5),
    "device_ids": ({}, {"device_ids": [0]}, 1e-5),
    "views": ({}, {"gradient_as_bucket_view": True}, 1e-5),
    "many buckets": ({}, {"gradient_as_bucket_view": True, "bucket_cap_mb": 0.0001}, 1e-5),
    "static graph": ({}, {"static_graph": True}, 1e-5),
    "unused parameters": ({"branches": True}, {"find_unused_parameters": True}, 1e-5),
    "no_sync": ({"accumulate": 2}, {}, 1e-5),
    "no_sync with views": ({"accumulate": 2}, {"gradient_as_bucket_view": True}, 1e-5),
    "hook": ({}, {"hook": (None, default_hooks.allreduce_hook)}, 1e-5),
    "hook in Python": ({}, {"hook": (None, python_chain_hook)}, 1e-5),
    "fp16": ({}, {"hook": (None, default_hooks.fp16_compress_hook)}, 1e-2),
    "bf16": ({}, {"hook": (None, default_hooks.bf16_compress_hook)}, 3e-2),
    "zero": ({}, {"zero": True}, 1e-5),
}


def variants() -> list[str]:
    checks = []
    for name, (alone, together, tolerance) in VARIANTS.items():
        if MAPPED and name == "bf16":  # torch takes that hook where it is built with NCCL
            continue
        check = functools.partial(compare, alone, together, tolerance, device=DEVICE)
        check.__name__ = name  # type: ignore[attr-defined]
        checks.append(check)
    return tried(checks)


def wrapped_before_nccl_is_connected() -> None:
    """A group of its own whose first call of CUDA tensors is the sum of a bucket."""
    group = dist.new_group()
    compare({}, {"group": group, "init_sync": False}, device=DEVICE)
    assert os.environ["DDP_DISABLE_COMM_MEM"] == "0"  # so the reducer asks for memory before that
    dist.destroy_process_group(group)


def several_sums_of_powersgd() -> None:
    model, inputs, targets = model_and_data(DEVICE)
    ddp = DistributedDataParallel(model, bucket_cap_mb=1e-4)  # several, whose sums take turns
    state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=1, start_powerSGD_iter=2)
    ddp.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    first = None
    for step in range(STEPS):
        loss = nn.functional.mse_loss(ddp(own_rows(inputs[step])), own_rows(targets[step]))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        first = first or [parameter.detach().clone() for parameter in model.parameters()]
    now = [parameter.detach() for parameter in model.parameters()]
    assert_same_on_all_ranks(now)
    assert first is not None and not any(torch.equal(a, b) for a, b in zip(first, now, strict=True))


def a_hook_that_steps_a_sharded_optimizer() -> None:
    model, inputs, targets = model_and_data(DEVICE)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    ddp = DistributedDataParallel(model, static_graph=True, bucket_cap_mb=1e-4)
    optimizer = ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.SGD, lr=0.1, overlap_with_ddp=True)
    hook = ddp_zero_hook.hook_with_zero_step(default_hooks.allreduce_hook, ddp, optimizer)
    ddp.register_comm_hook(None, hook)
    for step in range(STEPS):
        optimizer.zero_grad()
        nn.functional.mse_loss(ddp(own_rows(inputs[step])), own_rows(targets[step])).backward()
        optimizer.step()
    now = [parameter.detach() for parameter in model.parameters()]
    assert_same_on_all_ranks(now)
    assert not any(torch.equal(a, b) for a, b in zip(before, now, strict=True))


def a_state_of_shards_is_gathered() -> None:
    model, inputs, targets = model_and_data(DEVICE)
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=0.1)
    nn.functional.mse_loss(model(inputs[0]), targets[0]).backward()
    optimizer.step()
    optimizer.consolidate_state_dict(to=0)
    if dist.get_rank() == 0:
        alone, _, _ = model_and_data(DEVICE)
        plain = torch.optim.Adam(alone.parameters(), lr=0.1)
        nn.functional.mse_loss(alone(inputs[0]), targets[0]).backward()
        plain.step()
        found = optimizer.state_dict()["state"]
        for index, state in plain.state_dict()["state"].items():
            expected = state["exp_avg"].cpu()
            torch.testing.assert_close(found[index]["exp_avg"].cpu(), expected, rtol=1e-5, atol=1e-7)


def uneven_inputs() -> None:
    """Rank r has r + 1 batches; join() makes those who are through shadow the others."""
    torch.manual_seed(3)
    ddp = DistributedDataParallel(nn.Linear(4, 1).to(DEVICE))
    with ddp.join():
        for step in range(dist.get_rank() + 1):
            ddp(torch.full((2, 4), float(step), device=DEVICE)).sum().backward()
    with Join([ddp]):
        for _ in range(3 * dist.get_rank() + 1):
            ddp(torch.ones(2, 4, device=DEVICE)).sum().backward()
    assert_same_on_all_ranks([ddp.module.weight.detach()])
    # torch leaves the gradients of those who are through alone: the others' are the mean of one rank's
    assert dist.get_rank() == 0 or float(ddp.module.weight.grad.sum()) != 0


def buffers_follow_rank_zero() -> None:
    torch.manual_seed(11)
    ddp = DistributedDataParallel(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).to(DEVICE))
    for _ in range(3):
        ddp((torch.randn(8, 4) + dist.get_rank()).to(DEVICE)).sum().backward()
    ddp.eval()
    ddp(torch.randn(8, 4).to(DEVICE))
    assert_same_on_all_ranks([buffer for buffer in ddp.module.buffers() if buffer.is_floating_point()])


def statistics_over_all_ranks() -> None:
    """SyncBatchNorm, which torch has for GPUs alone, beside a convolution."""
    size, rank = dist.get_world_size(), dist.get_rank()
    torch.manual_seed(13)
    alone = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(4 * 36, 2)).to(
        DEVICE
    )
    together = nn.SyncBatchNorm.convert_sync_batchnorm(
        nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(4 * 36, 2)).to(DEVICE)
    )
    together.load_state_dict(alone.state_dict())
    ddp = DistributedDataParallel(together)
    images = torch.randn(4 * size, 3, 8, 8).to(DEVICE)
    alone(images).square().mean().backward()
    ddp(images[4 * rank : 4 * rank + 4]).square().mean().backward()
    for got, expected in zip(together.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(got.grad, expected.grad, rtol=1e-3, atol=1e-4)
    for got, expected in zip(together.buffers(), alone.buffers(), strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-3, atol=1e-4)


def scaled_losses_of_half_precision() -> None:
    """Autocast and a scaler, whose search for infinities is the same on all ranks."""
    model, inputs, targets = model_and_data(DEVICE)
    ddp = DistributedDataParallel(model)
    optimizer, scaler = (
        torch.optim.SGD(ddp.parameters(), lr=0.1),
        torch.amp.GradScaler("cuda", enabled=not MAPPED),
    )
    for step in range(STEPS):
        with torch.autocast("cuda", dtype=torch.bfloat16 if MAPPED else torch.float16):
            loss = nn.functional.mse_loss(ddp(own_rows(inputs[step])), own_rows(targets[step]))
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    assert_same_on_all_ranks([parameter.detach() for parameter in model.parameters()])


def a_model_on_the_cpu_beside_one_on_cuda() -> None:
    for device in ("cpu", DEVICE):
        ddp = DistributedDataParallel(nn.Linear(3, 1).to(device))
        ddp(torch.full((2, 3), dist.get_rank() + 1.0, device=device)).sum().backward()
        mean = (dist.get_world_size() + 1) / 2
        assert ddp.module.weight.grad.tolist() == [[2 * mean] * 3]


CHECKS = [
    wrapped_before_nccl_is_connected,
    several_sums_of_powersgd,
    a_hook_that_steps_a_sharded_optimizer,
    a_state_of_shards_is_gathered,
    uneven_inputs,
    buffers_follow_rank_zero,
    scaled_losses_of_half_precision,
    a_model_on_the_cpu_beside_one_on_cuda,
]
CHECKS_OF_A_GPU = [*CHECKS, statistics_over_all_ranks]


def test_every_variant_of_ddp_trains_cuda_models_like_one_process(gpus: Gpus) -> None:
    for failures in gpus(2).run(variants, timeout=90, group_timeout=30):
        assert not failures, "\n".join(failures)


def test_what_torch_builds_on_ddp_works_with_cuda_models(gpus: Gpus) -> None:
    for failures in gpus(2).run(tried, CHECKS if MAPPED else CHECKS_OF_A_GPU, timeout=90, group_timeout=30):
        assert not failures, "\n".join(failures)
