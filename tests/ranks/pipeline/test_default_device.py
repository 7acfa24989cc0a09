"""Scripts that choose another default device than that of their model, as those on a GPU may do.

The default device of these is one that has no data, so that whatever a library makes without naming a device
cannot be sent, read or written. Models and batches are made on the CPU before it is chosen.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.deprecated as legacy
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel.deprecated import DistributedDataParallel, DistributedDataParallelCPU

import smdistributed.dataparallel.torch.distributed as v1
import smdistributed.modelparallel.torch as smp
from opensmd.collectives.name import NAME
from opensmd.optim import FusedAdam, FusedLAMB, FusedNovoGrad
from tests.ranks.models.case import CLASSES, WIDTH, classify
from tests.support.partitioned import restart
from tests.support.patience import PATIENCE
from tests.support.ports import free_port
from tests.support.ranks import RankPool

Pool = Callable[[int], RankPool]
RATE, STEPS, ROWS = 0.1, 2, 8


@contextlib.contextmanager
def no_data_by_default() -> Iterator[None]:
    """Tensors that are made without naming their device have no data."""
    torch.set_default_device("meta")
    try:
        assert torch.ones(1).is_meta
        yield
    finally:
        torch.set_default_device(None)
        assert torch.ones(1).is_cpu


def network() -> nn.Module:
    torch.manual_seed(3)
    middle = [nn.BatchNorm1d(WIDTH), nn.Tanh(), nn.Dropout(0.0), nn.Linear(WIDTH, WIDTH)]
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), *middle, nn.Linear(WIDTH, CLASSES))


class Training:
    """A script's model, optimizer and step; its batches are made on the CPU."""

    def __init__(self, how: str, settings: dict[str, Any], options: dict[str, Any]) -> None:
        restart(microbatches=2, **settings)
        net = network()
        self.batches = [classify(step, ROWS) for step in range(STEPS + 1)]
        self.how, self._options = how, options
        self.wrapped(net)

    def wrapped(self, net: nn.Module) -> None:
        with no_data_by_default():
            self.model = model = smp.DistributedModel(net, **self._options)
            if self.how == "checkpointing":
                smp.set_activation_checkpointing(model.get_module().get_submodule("0"))
            sgd = torch.optim.SGD(net.parameters(), lr=RATE, momentum=0.9)
            self.optimizer = smp.DistributedOptimizer(sgd)

            @smp.step
            def step(x: Tensor, y: Tensor) -> Tensor:
                loss = F.cross_entropy(model(x), y)
                model.backward(loss)
                return loss

            self.step = step

    def train(self, number: int) -> float:
        x, y = self.batches[number]
        mine = slice(smp.dp_rank(), None, smp.dp_size())
        with no_data_by_default():
            self.optimizer.zero_grad()
            loss = float(self.step(x[mine], y[mine]).reduce_mean())
            if self.how == "clipping":
                self.optimizer.clip_master_grads(0.01)
            self.optimizer.step()
        return loss


def trained_saved_and_resumed(
    folder: str, how: str, settings: dict[str, Any], options: dict[str, Any]
) -> list[float]:
    """The losses of a training, the last of which comes again after each way to resume."""
    training = Training(how, settings, options)
    losses = [training.train(number) for number in range(STEPS)]
    saved: dict[str, Any] = {"model": training.model, "optimizer": training.optimizer}
    ways: dict[str, dict[str, Any]] = {"part": {}, "later": {"blocking": False}, "full": {"partial": False}}
    with no_data_by_default():
        for tag, more in ways.items():
            saving = smp.save_checkpoint(folder, tag, user_content={"step": STEPS}, **saved, **more)
            if saving is not None:
                saving.wait()
        state = {"model": training.model.state_dict(), "optimizer": training.optimizer.state_dict()}
        smp.save(state, f"{folder}/by-hand", partial=False)
    last = training.train(STEPS)
    for tag in ("part", "later", "full", "by-hand"):
        again = Training(how, settings, options)
        again.train(0)
        with no_data_by_default():
            if tag == "by-hand":
                found = smp.load(f"{folder}/by-hand", partial=False)
                again.model.load_state_dict(found["model"])
                again.optimizer.load_state_dict(found["optimizer"])
            else:
                content = smp.resume_from_checkpoint(folder, tag, partial=tag != "full")
                assert content["step"] == STEPS
        assert again.train(STEPS) == pytest.approx(last, rel=1e-6), tag
    with no_data_by_default():
        whole = again.model.state_dict()
        assert not any(each.is_meta for each in whole.values() if isinstance(each, Tensor))
        assert smp.allgather({"tensor": state["model"]["0.weight"]}, smp.WORLD)[-1]["tensor"].is_cpu
        smp.barrier()
    return [*losses, last]


def alone(how: str) -> list[float]:
    """Plain PyTorch with the whole batch; ranks of one replica have the whole batch, too."""
    net = network()
    optimizer = torch.optim.SGD(net.parameters(), lr=RATE, momentum=0.9)
    losses = []
    for number in range(STEPS + 1):
        optimizer.zero_grad()
        x, y = classify(number, ROWS)
        pieces = [F.cross_entropy(net(a), b) for a, b in zip(x.chunk(2), y.chunk(2), strict=True)]
        loss = torch.stack(pieces).mean()
        torch.autograd.backward(loss)
        if how == "clipping":
            nn.utils.clip_grad_norm_(net.parameters(), 0.01)
        optimizer.step()
        losses.append(loss.item())
    return losses


SPLIT: dict[str, dict[str, Any]] = {
    "plain": {},
    "checkpointing": {},
    "clipping": {},
    "in order": {"fast_mode": False},
    "offloading": {"offload_activations": True},
    "v": {"pipeline": "v"},
}


@pytest.mark.parametrize("how", SPLIT)
def test_a_split_model_trains_and_is_saved_under_another_default_device(
    pool: Pool, tmp_path: Any, how: str
) -> None:
    settings = {"partitions": 2, **SPLIT[how]}
    for losses in pool(2).run(trained_saved_and_resumed, str(tmp_path), how, settings, {}):
        assert losses == pytest.approx(alone(how), rel=1e-5)


REPLICAS: dict[str, dict[str, Any]] = {
    "stages": {"partitions": 2, "ddp": True},
    "sharded state": {"partitions": 2, "ddp": True, "shard_optimizer_state": True},
    "without overlap": {"partitions": 2, "ddp": True},
}


@pytest.mark.parametrize("how", REPLICAS)
def test_replicas_train_and_are_saved_under_another_default_device(
    pool: Pool, tmp_path: Any, how: str
) -> None:
    options = {"overlapping_allreduce": False} if how == "without overlap" else {}
    found = pool(4).run(trained_saved_and_resumed, str(tmp_path), how, REPLICAS[how], options)
    assert found[0] == found[1] and found[2] == found[3] and found[0] != found[2]


def in_other_precisions(settings: dict[str, Any]) -> list[float]:
    """What only its own settings use; the losses of a training."""
    training = Training("", settings, {})
    return [training.train(number) for number in range(STEPS)]


@pytest.mark.parametrize(
    "settings",
    [
        {"partitions": 2, "fp16": True},
        {"partitions": 1, "ddp": True, "bf16": True},
        {"partitions": 1, "ddp": True, "sharded_data_parallel_degree": 2},
    ],
    ids=["fp16", "bf16", "sharded parameters"],
)
def test_every_way_to_train_works_under_another_default_device(pool: Pool, settings: dict[str, Any]) -> None:
    for first, *_, last in pool(2).run(in_other_precisions, settings):
        assert first > 0 and last > 0


def of_torch() -> None:
    """DDP over smddp, the calls of v1, and objects; the fused optimizers."""
    rank, net = dist.get_rank(), network()
    x, y = classify(0, ROWS)
    own, ones = torch.full((3,), float(rank)), torch.ones(2)
    with no_data_by_default():
        model = nn.parallel.DistributedDataParallel(net)
        for kind in (FusedAdam, FusedLAMB, FusedNovoGrad):
            optimizer = kind(model.parameters(), lr=1e-3)
            optimizer.zero_grad()
            torch.autograd.backward(F.cross_entropy(model(x[rank::2]), y[rank::2]))
            optimizer.step()
        assert all(torch.isfinite(each).all() for each in model.parameters())
        v1.all_reduce(own)
        v1.barrier()
        everyone: list[Any] = [None, None]
        dist.all_gather_object(everyone, {"rank": rank, "ones": ones})
        dist.barrier()
    assert own.tolist() == [1.0] * 3
    assert [each["rank"] for each in everyone] == [0, 1] and everyone[1]["ones"].tolist() == [1.0, 1.0]


def test_smddp_and_the_optimizers_work_under_another_default_device(pool: Pool) -> None:
    pool(2).run(of_torch, backend=NAME)


def of_the_old_package(backend: str, port: int) -> None:
    os.environ.update(OPENSMD_LEGACY_ENGINE="smddp", OPENSMD_LEGACY_TIMEOUT=str(PATIENCE))
    rank = int(os.environ["RANK"])
    nets = [network(), network()]
    own, got = torch.full((3,), float(rank)), torch.zeros(3)
    x, y = classify(0, ROWS)
    with no_data_by_default():
        legacy.init_process_group(backend, f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
        for wrapper, net in zip((DistributedDataParallel, DistributedDataParallelCPU), nets, strict=True):
            model = wrapper(net)
            torch.autograd.backward(F.cross_entropy(model(x[rank::2]), y[rank::2]))
        legacy.all_reduce(own)
        if rank == 0:
            legacy.send(own, 1)
        else:
            legacy.recv(got)
            assert got.tolist() == [1.0] * 3
        legacy.barrier()
        legacy.destroy_process_group()
    for net in nets:
        assert all(each.grad is not None and each.grad.is_cpu for each in net.parameters())


@pytest.mark.parametrize("backend", ["tcp", "gloo"])
def test_the_old_package_works_under_another_default_device(pool: Pool, backend: str) -> None:
    pool(2).run(of_the_old_package, backend, free_port(), backend=None)
