"""``smdistributed.dataparallel.torch`` with CUDA models: the v1 functions and the wrapper of its examples."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

import smdistributed.dataparallel.torch.distributed as v1
from smdistributed.dataparallel.torch.parallel import DistributedDataParallel as DDP
from tests.ranks.data_parallel.test_dataparallel_ddp import PER_RANK, gradients, network
from tests.support.cuda import DEVICE, CudaRanks
from tests.support.tried import tried

Gpus = Callable[[int], CudaRanks]


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(9)
    rows = PER_RANK * v1.get_world_size()
    return torch.randn(rows, 6, generator=generator).to(DEVICE), torch.randn(rows, 3, generator=generator).to(
        DEVICE
    )


def mine(whole: torch.Tensor) -> torch.Tensor:
    return whole[v1.get_rank() * PER_RANK : (v1.get_rank() + 1) * PER_RANK]


def functions() -> None:
    rank, size = v1.get_rank(), v1.get_world_size()
    assert v1.get_local_rank() == rank
    for device in (DEVICE, "cpu"):
        for op, wanted in (
            (v1.ReduceOp.SUM, sum(range(size))),
            (v1.ReduceOp.AVERAGE, sum(range(size)) / size),
            (v1.ReduceOp.MIN, 0),
            (v1.ReduceOp.MAX, size - 1),
        ):
            tensor = torch.full((3,), float(rank), device=device)
            v1.all_reduce(tensor, op)
            assert tensor.tolist() == [wanted] * 3
        work = v1.broadcast(tensor.fill_(rank), 1, async_op=True)
        assert work is not None
        work.wait()
        assert tensor.tolist() == [1.0] * 3
        found = [torch.empty(2, device=device) for _ in range(size)]
        v1.all_gather(found, torch.full((2,), float(rank), device=device))
        assert [float(each[0]) for each in found] == list(range(size))
        output = torch.empty(size, device=device)
        v1.all_to_all_single(output, torch.full((size,), float(rank), device=device))
        assert output.tolist() == list(range(size))
    v1.barrier()


def models_that_are_moved() -> None:
    """Wrapped where they are, and wrapped first and moved afterwards, as in the original's examples."""
    x, y = batch()
    alone = network().to(DEVICE)
    nn.functional.mse_loss(alone(x), y).backward()
    expected = gradients(alone)
    device = torch.cuda.current_device()

    def train(name: str, model: DDP) -> None:
        for _ in range(2):  # the second time with the buckets that torch has rebuilt
            model.zero_grad()
            nn.functional.mse_loss(model(mine(x)), mine(y)).backward()
        got = gradients(model)
        assert len(got) == len(expected), name
        for grad, wanted in zip(got, expected, strict=True):
            assert grad.device.type == DEVICE, name
            torch.testing.assert_close(grad, wanted, rtol=1e-5, atol=1e-6, msg=lambda m: f"{name}: {m}")

    train("on its device", DDP(network().cuda(), device_ids=[device], output_device=device))
    train("without device_ids", DDP(network().cuda(), broadcast_buffers=False, bucket_cap_mb=1))
    moved = DDP(network())
    moved.cuda(device)
    train("moved by cuda()", moved)
    train("moved by to()", DDP(network()).to("cuda"))
    inner = network()
    outer = DDP(inner)
    inner.cuda()
    train("moved from inside", outer)
    hooked = DDP(network())
    hooked.register_comm_hook(None, default_hooks.allreduce_hook)
    hooked.cuda()
    train("moved with a hook", hooked)
    again = DDP(network().cuda())
    train("before a change of type", again)
    again.double()
    again.float()
    train("after a change of type", again)


def gradients_without_sync() -> None:
    x, y = batch()
    alone = network().to(DEVICE)
    nn.functional.mse_loss(alone(x), y).backward()
    model = DDP(network().cuda())
    with model.no_sync():
        nn.functional.mse_loss(model(mine(x)), mine(y)).backward()
    nn.functional.mse_loss(model(mine(x)), mine(y)).backward()
    for grad, wanted in zip(gradients(model), gradients(alone), strict=True):
        torch.testing.assert_close(grad, 2 * wanted, rtol=1e-5, atol=1e-6)


def evaluation_on_rank_0() -> None:
    """Buffers are broadcast in training alone, so that nobody waits for ranks that do not evaluate."""
    x, _ = batch()
    for broadcast in (True, False):
        model = DDP(network(norm=True), broadcast_buffers=broadcast)
        model.cuda()
        for _ in range(2):
            model.train()
            model(mine(x)).sum().backward()
            if dist.get_rank() == 0:
                model.eval()
                with torch.no_grad():
                    assert model(mine(x)).isfinite().all()
        model.train()
        model(mine(x))
        means: Any = [torch.empty(8, device=DEVICE) for _ in range(v1.get_world_size())]
        v1.all_gather(means, model.module[1].running_mean)
        # the last forward changed each rank's own again, by its own rows
        assert not torch.equal(means[0], means[1])


CHECKS = [functions, models_that_are_moved, gradients_without_sync, evaluation_on_rank_0]


def in_the_old_interface() -> list[str]:
    torch.ones(1, device=DEVICE)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        v1.init_process_group()
        failures = tried(CHECKS)
    dist.destroy_process_group()
    return failures


def test_the_old_interface_trains_cuda_models_like_one_process(gpus: Gpus) -> None:
    for failures in gpus(2).run(in_the_old_interface, backend=None, timeout=60):
        assert not failures, "\n".join(failures)
