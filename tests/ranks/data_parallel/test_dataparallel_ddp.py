"""The v1 DistributedDataParallel: gradients equal to those of one process on the whole batch."""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

from opensmd.launch.mapped_cuda import cuda_on_cpu
from smdistributed.dataparallel.exceptions import SMDDPGroupError, SMDDPNotInitializedError
from smdistributed.dataparallel.torch.distributed import group
from smdistributed.dataparallel.torch.parallel import DistributedDataParallel as DDP
from tests.support.patience import PATIENCE
from tests.support.ranks import RankPool

Pool = Callable[[int], RankPool]

SIZE = 2
PER_RANK = 4


def network(*, norm: bool = False) -> nn.Module:
    torch.manual_seed(5)
    middle: nn.Module = nn.BatchNorm1d(8) if norm else nn.Tanh()
    return nn.Sequential(nn.Linear(6, 8), middle, nn.Linear(8, 3))


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(9)
    x = torch.randn(SIZE * PER_RANK, 6, generator=generator, dtype=torch.float64)
    return x, torch.randn(SIZE * PER_RANK, 3, generator=generator, dtype=torch.float64)


def mine(whole: torch.Tensor) -> torch.Tensor:
    rank = dist.get_rank()
    return whole[rank * PER_RANK : (rank + 1) * PER_RANK]


def gradients(model: nn.Module) -> list[torch.Tensor]:
    return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]


def late_moves() -> dict[str, list[torch.Tensor]]:
    """Gradients after wrapping first and moving afterwards, in every way a module can be moved."""
    x, y = batch()
    found = {}

    def train(name: str, model: DDP, *, times: int = 2) -> None:
        for _ in range(times):  # the second time with the buckets that torch has rebuilt
            model.zero_grad()
            nn.functional.mse_loss(model(mine(x)), mine(y)).backward()
        found[name] = gradients(model)

    train("not moved", DDP(network().double()))
    train("moved", DDP(network()).double())
    train("moved by to()", DDP(network()).to(torch.float64))
    inner = network()
    outer = DDP(inner)
    inner.double()
    train("moved from inside", outer)
    moved = DDP(network().double())
    train("moved", moved)
    moved.float()
    moved.double()
    train("moved after training", moved)
    hooked = DDP(network())
    hooked.register_comm_hook(None, default_hooks.allreduce_hook)
    train("moved with a hook", hooked.double())
    cuda_on_cpu.install()
    wrapped = DDP(network().double(), device_ids=[0])
    torch.cuda.set_device(int(dist.get_rank()))
    wrapped.cuda(dist.get_rank())
    train("moved by cuda()", wrapped)
    cuda_on_cpu.uninstall()
    return found


@pytest.mark.newest
def test_gradients_are_exchanged_wherever_the_model_went_after_wrapping(pool: Pool) -> None:
    x, y = batch()
    model = network().double()
    nn.functional.mse_loss(model(x), y).backward()
    expected = gradients(model)
    answers = pool(SIZE).run(late_moves)
    for found in answers:
        assert len(found) == 7
        for name, grads in found.items():
            for grad, wanted in zip(grads, expected, strict=True):
                torch.testing.assert_close(grad, wanted, rtol=1e-6, atol=1e-9, msg=name)
    for name in answers[0]:
        for first, second in zip(answers[0][name], answers[1][name], strict=True):
            assert torch.equal(first, second), name


def without_sync() -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Gradients inside no_sync, and after the step that ends it."""
    x, y = batch()
    model = DDP(network().double())
    with model.no_sync():
        nn.functional.mse_loss(model(mine(x)), mine(y)).backward()
    local = gradients(model)
    nn.functional.mse_loss(model(mine(x)), mine(y)).backward()
    return local, gradients(model)


def test_no_sync_keeps_gradients_local_and_adds_them_up(pool: Pool) -> None:
    x, y = batch()
    model = network().double()
    nn.functional.mse_loss(model(x), y).backward()
    expected = [2 * gradient for gradient in gradients(model)]
    answers = pool(SIZE).run(without_sync)
    for _, after in answers:
        for grad, wanted in zip(after, expected, strict=True):
            torch.testing.assert_close(grad, wanted)
    assert not torch.equal(answers[0][0][0], answers[1][0][0])


def buffers(broadcast: bool) -> dict[str, Any]:
    """Training with batch normalisation, and an evaluation on rank 0 alone in the middle."""
    x, _ = batch()
    model = DDP(network(norm=True).double(), broadcast_buffers=broadcast)
    for step in range(3):
        model.train()
        model(mine(x)).sum().backward()
        if dist.get_rank() == 0 and step == 1:
            model.eval()
            with torch.no_grad():
                model(x)
    model.train()
    model(mine(x)).sum().backward()
    norm = model.module[1]
    return {"mean": norm.running_mean, "batches": int(norm.num_batches_tracked)}


@pytest.mark.parametrize("broadcast", [True, False])
def test_rank_0_may_evaluate_alone_whether_or_not_buffers_are_broadcast(pool: Pool, broadcast: bool) -> None:
    first, second = pool(SIZE).run(buffers, broadcast)
    assert first["batches"] == second["batches"] == 4
    # Each forward starts from rank 0's buffers if they are broadcast, and from the rank's own if not.
    gap = (first["mean"] - second["mean"]).abs().max()
    x, _ = batch()
    single = network(norm=True).double()
    for _ in range(4):
        single(x[:PER_RANK])
    torch.testing.assert_close(first["mean"], single[1].running_mean)
    own = network(norm=True).double()
    for _ in range(3 if broadcast else 4):
        own(x[:PER_RANK] if broadcast else x[PER_RANK:])
    if broadcast:
        own(x[PER_RANK:])
    torch.testing.assert_close(second["mean"], own[1].running_mean)
    assert gap > 0


def refusals() -> list[str]:
    """What the wrapper says to a group of its own."""
    try:
        DDP(network(), process_group=dist.new_group([0, 1]))
    except SMDDPGroupError as error:
        text = str(error)
    model = DDP(network(), None, None, False, group.WORLD, 10)
    return [
        text,
        str(model.bucket_bytes_cap),
        str(DDP(network()).bucket_bytes_cap),
        type(model.module).__name__,
    ]


def test_the_documented_parameters_are_accepted_and_other_groups_refused(pool: Pool) -> None:
    for text, ten, default, module in pool(SIZE).run(refusals):
        assert "process_group=" in text and "only group.WORLD" in text
        assert (int(ten), int(default)) == (10 << 20, 25 << 20)
        assert module == "Sequential"


def test_parameters_that_the_old_wrapper_dropped_or_never_had_are_refused_with_what_to_use() -> None:
    for name in ("gradient_accumulation_steps", "find_unused_parameters"):
        with pytest.raises(TypeError, match=rf"takes no {name}. .*no_sync.*torch.nn.parallel"):
            DDP(network(), **{name: True})


def test_wrapping_before_initialisation_says_what_is_missing() -> None:
    with pytest.raises(SMDDPNotInitializedError, match=r"init_process_group\(\)"):
        DDP(network())


def a_group_asked_of_nccl() -> list[float]:
    """A script that hard-codes NCCL and device ids, under --device cpu."""
    cuda_on_cpu.install()
    try:
        dist.init_process_group("nccl", device_id=torch.device("cuda", dist_rank()))
        assert dist.get_backend() == "smddp"
        x, y = batch()
        model = nn.parallel.DistributedDataParallel(network().double().cuda(), device_ids=[dist_rank()])
        nn.functional.mse_loss(model(mine(x).cuda()), mine(y).to("cuda")).backward()
        dist.barrier(device_ids=[dist_rank()])
        dist.barrier(timeout=timedelta(seconds=PATIENCE))
        part = dist.new_group([0, 1], backend="nccl")
        total = torch.ones(1, device="cuda")
        dist.all_reduce(total, group=part)
        mesh = dist.init_device_mesh("cuda", (2,))
        assert mesh.device_type == "cpu"
        dist.destroy_process_group()
        return [total.item(), *gradients(model)[0].flatten().tolist()]
    finally:
        cuda_on_cpu.uninstall()


def dist_rank() -> int:
    return int(os.environ["RANK"])


def test_a_script_that_hard_codes_nccl_runs_on_the_cpu(pool: Pool) -> None:
    x, y = batch()
    model = network().double()
    nn.functional.mse_loss(model(x), y).backward()
    expected = gradients(model)[0].flatten()
    for total, *grad in pool(SIZE).run(a_group_asked_of_nccl, backend=None):
        assert total == 2
        torch.testing.assert_close(torch.tensor(grad, dtype=torch.float64), expected)


def refuse_what_cannot_be_meant() -> None:
    for cap in (0, -3, "25"):
        with pytest.raises(ValueError, match="bucket_cap_mb must be a positive number of MiB or None, got"):
            DDP(network(), bucket_cap_mb=cap)
    with pytest.raises(TypeError, match=r"expected a torch\.nn\.Module, got"):
        DDP(network().forward)
    if not torch.cuda.is_available():
        with pytest.raises(ValueError, match="output_device=0 must be None for a module on the CPU"):
            DDP(network(), output_device=0)


def test_the_wrapper_refuses_wrong_arguments_with_one_clear_error(pool: Pool) -> None:
    pool(SIZE).run(refuse_what_cannot_be_meant)
