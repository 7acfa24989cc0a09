"""Scripts that make the GPU torch's default device, and name it nowhere."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import smdistributed.modelparallel.torch as smp
from opensmd.optim import FusedAdam, FusedLAMB, FusedNovoGrad
from tests.support.cuda import DEVICE, CudaRanks
from tests.support.partitioned import restart

Gpus = Callable[[int], CudaRanks]
WIDTH, ROWS, STEPS = 24, 8, 2


@contextlib.contextmanager
def gpu_by_default() -> Iterator[None]:
    torch.set_default_device("cuda")
    try:
        assert torch.ones(1).device.type == DEVICE
        yield
    finally:
        torch.set_default_device(None)


def network(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    layers = [nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Tanh(), nn.Dropout(0.1)]
    return nn.Sequential(*layers, nn.Linear(WIDTH, WIDTH))


def batch(number: int) -> Tensor:
    return torch.linspace(-1, 1, ROWS * WIDTH).view(ROWS, WIDTH).roll(number)


class Training:
    """A script's model, optimizer and step."""

    def __init__(self, seed: int = 0, **settings: Any) -> None:
        restart(microbatches=2, **settings)
        self.model = model = smp.DistributedModel(network(seed))
        self.optimizer = smp.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=0.01))

        @smp.step
        def step(x: Tensor) -> Tensor:
            loss: Tensor = model(x).square().mean()
            model.backward(loss)
            return loss

        self.step = step

    def train(self, number: int) -> float:
        self.optimizer.zero_grad()
        loss = float(self.step(batch(number)).reduce_mean())
        self.optimizer.step()
        return loss


def trained_saved_and_resumed(folder: str, settings: dict[str, Any]) -> None:
    """The step after a save comes again after each way to resume."""
    with gpu_by_default():
        training = Training(**settings)
        for number in range(STEPS):
            training.train(number)
        saved: dict[str, Any] = {"model": training.model, "optimizer": training.optimizer}
        ways: dict[str, Any] = {"part": {}, "later": {"blocking": False}, "full": {"partial": False}}
        for tag, more in ways.items():
            saving = smp.save_checkpoint(folder, tag, user_content={"step": STEPS}, **saved, **more)
            if saving is not None:
                saving.wait()
        state = {"model": training.model.state_dict(), "optimizer": training.optimizer.state_dict()}
        smp.save(state, f"{folder}/by-hand", partial=False)
        smp.barrier()
        for tag in (*ways, "by-hand"):
            again = Training(seed=1, **settings)
            again.train(0)
            if tag == "by-hand":
                found = smp.load(f"{folder}/by-hand", partial=False)
                again.model.load_state_dict(found["model"])
                again.optimizer.load_state_dict(found["optimizer"])
            else:
                smp.resume_from_checkpoint(folder, tag, partial=tag != "full")
            for name, value in again.model.state_dict().items():
                wanted = state["model"][name].to(value.device)
                torch.testing.assert_close(value, wanted, rtol=0, atol=0, msg=f"{tag}: {name}")
            assert {each.device.type for each in again.model.local_parameters()} == {DEVICE}, tag
            assert again.train(STEPS) > 0, tag


@pytest.mark.parametrize(
    "settings",
    [
        {"partitions": 2},
        {"partitions": 1, "ddp": True},
        {"partitions": 1, "ddp": True, "shard_optimizer_state": True},
        {"partitions": 2, "fp16": True},
    ],
    ids=["split", "replicas", "sharded state", "fp16"],
)
def test_a_model_trains_and_is_saved_where_the_gpu_is_the_default_device(
    gpus: Gpus, tmp_path: Any, settings: dict[str, Any]
) -> None:
    gpus(2).run(trained_saved_and_resumed, str(tmp_path), settings)


def of_torch() -> None:
    """DDP over smddp, the fused optimizers, and objects."""
    rank = dist.get_rank()
    with gpu_by_default():
        net = network(rank)  # the first rank's counts
        model = nn.parallel.DistributedDataParallel(net, device_ids=[torch.cuda.current_device()])
        for kind in (FusedAdam, FusedLAMB, FusedNovoGrad):
            optimizer = kind(model.parameters(), lr=1e-3)
            optimizer.zero_grad()
            model(batch(rank)).square().mean().backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
        whole = torch.cat([each.detach().flatten() for each in model.parameters()])
        others = torch.empty_like(whole) if rank else whole.clone()
        dist.broadcast(others, 0)
        assert torch.equal(whole, others)
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, {"rank": rank, "ones": torch.ones(2)})
        assert [each["rank"] for each in everyone] == [0, 1]
        assert {each["ones"].device.type for each in everyone} == {DEVICE}
        sent: list[Any] = [torch.arange(3) if rank == 0 else None]
        dist.broadcast_object_list(sent, 0)
        assert sent[0].tolist() == [0, 1, 2]
        dist.barrier(device_ids=[torch.cuda.current_device()])


def test_smddp_and_the_optimizers_work_where_the_gpu_is_the_default_device(gpus: Gpus) -> None:
    gpus(2).run(of_torch)
