"""Optimizer state that replicas share out: trained as without, in counted bytes, for any degree."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import smdistributed.modelparallel.torch as smp
from opensmd.modelparallel.exceptions import SMPError
from opensmd.modelparallel.init import shutdown
from tests.support.ranks import RankPool

Pools = Callable[[int], RankPool]
WIDTH, ROWS, CLIP = 15, 8, 0.5
Make = Callable[[Any], torch.optim.Optimizer]


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01)


def momentum(parameters: Any) -> torch.optim.Optimizer:
    groups = list(parameters)
    return torch.optim.SGD([{"params": groups[:2]}, {"params": groups[2:], "lr": 0.02}], lr=0.1, momentum=0.9)


class Gain(nn.Module):
    """A parameter without axes, like the counts of steps in an optimizer's state."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.tensor(1.5))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.gain


class Training:
    """A script's model, with parameters of one element, and its optimizer."""

    def __init__(self, make: Make, partitions: int, *, shard: bool, **settings: Any) -> None:
        shutdown()
        smp.init({"partitions": partitions, "ddp": True, "shard_optimizer_state": shard, **settings})
        torch.manual_seed(0)
        layers = [nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 1)]
        self.model = smp.DistributedModel(nn.Sequential(*layers, Gain()), gradient_as_bucket_view=shard)
        self.optimizer = smp.DistributedOptimizer(make(self.model.parameters()))
        model = self.model

        @smp.step
        def step(x: Tensor) -> Tensor:
            loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
            model.backward(loss)
            return loss

        self.step = step

    def train(self, number: int) -> tuple[float, float]:
        self.optimizer.zero_grad(set_to_none=number % 2 == 0)
        generator = torch.Generator().manual_seed(number)
        whole = torch.randn(2 * ROWS, WIDTH, generator=generator)
        mine = whole.chunk(smp.rdp_size())[smp.rdp_rank()]
        loss = self.step(mine).reduce_mean().item()
        norm = self.optimizer.clip_master_grads(CLIP)
        self.optimizer.step()
        return loss, norm

    def state_bytes(self) -> int:
        states = self.optimizer.state.values()
        return sum(each.nbytes for entries in states for each in entries.values() if each.dim() > 0)


def same_state(first: dict[str, Any], second: dict[str, Any]) -> None:
    torch.testing.assert_close(first["state"], second["state"], rtol=0, atol=0)
    assert first["param_groups"] == second["param_groups"]


def trains_as_without(make: Make, partitions: int, folder: Path) -> None:
    plain = Training(make, partitions, shard=False)
    expected = [plain.train(number) for number in range(5)]
    of_plain, whole = plain.optimizer.state_dict(), plain.state_bytes()
    sharded = Training(make, partitions, shard=True)
    of_replicas = smp.rdp_size()
    assert [sharded.train(number) for number in range(3)] == expected[:3]
    assert sharded.state_bytes() < 1.05 * whole / smp.rdp_size() + 64
    saved = copy.deepcopy((sharded.model.state_dict(), sharded.optimizer.state_dict()))
    smp.save_checkpoint(str(folder), "three", model=sharded.model, optimizer=sharded.optimizer)
    assert [sharded.train(number) for number in range(3, 5)] == expected[3:]
    same_state(sharded.optimizer.state_dict(), of_plain)
    for shard in (True, False):  # before the first step, and after one
        again = Training(make, partitions, shard=shard)
        if shard:
            again.train(9)
        again.model.load_state_dict(saved[0])
        again.optimizer.load_state_dict(copy.deepcopy(saved[1]))  # torch keeps the tensors
        assert [again.train(number) for number in range(3, 5)] == expected[3:]
    # with half or twice as many replicas
    resumed = Training(make, 1 if partitions == 2 else 2, shard=True)
    smp.resume_from_checkpoint(str(folder), "three")
    losses, norms = zip(*[resumed.train(number) for number in range(3, 5)], strict=True)
    assert smp.rdp_size() != of_replicas
    torch.testing.assert_close(torch.tensor(norms), torch.tensor([norm for _, norm in expected[3:]]))
    mean = torch.tensor(losses)
    dist.all_reduce(mean)
    before = torch.tensor([loss for loss, _ in expected[3:]])
    dist.all_reduce(before)
    torch.testing.assert_close(mean, before)


def saves_slices_as_trainer_does(folder: Path) -> None:
    """Every replica its own, in files with three numbers, which are loaded after the first step."""
    training = Training(adam, 1, shard=True)
    for number in range(3):
        training.train(number)
    if smp.rdp_rank() == 0:
        smp.save(training.model.local_state_dict(), str(folder / "model.pt"), partial=True)
    own = training.optimizer.local_state_dict(gather_if_shard=False)
    smp.save(own, str(folder / "optimizer.pt"), partial=True, v3=smp.state.cfg.shard_optimizer_state)
    smp.barrier()
    assert {each.name for each in folder.glob("optimizer.pt_*")} == {
        f"optimizer.pt_0_0_{replica}" for replica in range(smp.rdp_size())
    }
    wanted = [training.train(number) for number in range(3, 5)]
    again = Training(adam, 1, shard=True)
    again.model.load_state_dict(smp.load(str(folder / "model.pt"), partial=True), same_partition_load=True)

    def load(_: object, optimizer: Any) -> None:
        optimizer.load_state_dict(smp.load(str(folder / "optimizer.pt"), partial=True, back_compat=True))

    again.model.register_post_step_hook(load)
    generator = torch.Generator().manual_seed(3)
    again.step(torch.randn(2 * ROWS, WIDTH, generator=generator).chunk(smp.rdp_size())[smp.rdp_rank()])
    assert [again.train(number) for number in range(3, 5)] == wanted


def trains_in_16_bits_as_without(key: str, partitions: int) -> None:
    trainings = []
    for shard in (False, True):
        training = Training(adam, partitions, shard=shard, **{key: True})
        losses, norms = zip(*[training.train(number) for number in range(4)], strict=True)
        masters = sum(each.nbytes for each in training.optimizer.master_params)
        saved = copy.deepcopy(training.optimizer.state_dict())
        model = copy.deepcopy(training.model.state_dict())
        trainings.append((losses, norms, saved["state"], masters + training.state_bytes()))
        if shard:
            later = training.train(4)
            again = Training(adam, partitions, shard=True, **{key: True})
            again.model.load_state_dict(model)
            again.optimizer.load_state_dict(copy.deepcopy(saved))
            assert again.train(4) == later
    plain, sharded = trainings
    assert sharded[0] == plain[0]
    torch.testing.assert_close(sharded[1:3], plain[1:3], rtol=1e-6, atol=1e-7)
    assert sharded[3] < 1.05 * plain[3] / smp.rdp_size() + 64


def of_tensor_parallel_ranks(partitions: int, *, memory_keys: bool) -> dict[str, Any]:
    """Losses, norms and state of a model whose linears two ranks share."""
    shutdown()
    degrees = {"partitions": partitions, "tensor_parallel_degree": 2, "prescaled_batch": True, "ddp": True}
    keys = ("shard_optimizer_state", "delayed_parameter_initialization")
    smp.init(degrees | dict.fromkeys(keys, memory_keys))
    torch.manual_seed(0)
    with smp.model_creation(tensor_parallelism=True):
        net = nn.Sequential(*[layer for _ in range(3) for layer in (nn.Linear(64, 64), nn.Tanh())])
    model = smp.DistributedModel(net)
    assert len(model.shards) >= 3
    optimizer = smp.DistributedOptimizer(adam(model.parameters()))

    @smp.step
    def step(x: Tensor) -> Tensor:
        loss = (model(x) - 1).square().mean()
        model.backward(loss)
        return loss

    losses, norms = [], []
    for number in range(3):
        optimizer.zero_grad()
        torch.manual_seed(10 * number + smp.rdp_rank())
        losses.append(step(torch.randn(ROWS, 64)).reduce_mean().item())
        norms.append(optimizer.clip_master_grads(CLIP))
        optimizer.step()
    state = optimizer.state_dict()["state"]
    return {"losses": losses, "norms": norms, "model": model.state_dict(), "optimizer": state}


def goes_with_tensor_parallelism(partitions: int) -> None:
    plain = of_tensor_parallel_ranks(partitions, memory_keys=False)
    torch.testing.assert_close(of_tensor_parallel_ranks(partitions, memory_keys=True), plain, rtol=0, atol=0)


def refuses_sparse_gradients() -> None:
    shutdown()
    smp.init({"partitions": 1, "ddp": True, "shard_optimizer_state": True})
    model = smp.DistributedModel(nn.Embedding(20, 8, sparse=True))
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    smp.step(lambda x: model.backward(model(x).sum()))(torch.ones(4, dtype=torch.long))
    with pytest.raises(ValueError, match="a parameter has sparse gradients"):
        optimizer.step()


def refusals() -> None:
    for make, text in (
        (lambda parameters: torch.optim.Adafactor(parameters), "Adafactor may need whole parameters"),
        (lambda parameters: torch.optim.LBFGS(parameters), "LBFGS works on all parameters"),
    ):
        with pytest.raises(ValueError, match=text):
            Training(make, 1, shard=True)
    training = Training(adam, 1, shard=True)
    with pytest.raises(SMPError, match="before the first smp"):
        training.optimizer.step()
    with pytest.raises(SMPError, match="shard_optimizer_state"):
        smp.amp.GradScaler("cpu")
    training.train(0)
    with pytest.raises(ValueError, match="takes no closure"):
        training.optimizer.step(lambda: None)
    own = training.optimizer.local_state_dict(gather_if_shard=False)
    with pytest.raises(SMPError, match="after the first step"):
        Training(adam, 1, shard=True).optimizer.load_state_dict(own)


def test_sharded_optimizer_state_trains_as_whole_and_goes_on_at_another_degree(
    pool: Pools, tmp_path: Path
) -> None:
    pool(2).run(trains_as_without, adam, 1, tmp_path / "whole")
    pool(4).run(trains_as_without, momentum, 2, tmp_path / "split")
    pool(4).run(trains_as_without, adam, 1, tmp_path / "of four")


def test_every_replica_may_save_its_slices_alone(pool: Pools, tmp_path: Path) -> None:
    for ranks in (2, 4):
        folder = tmp_path / str(ranks)
        folder.mkdir()
        pool(ranks).run(saves_slices_as_trainer_does, folder)


@pytest.mark.parametrize("key", ["bf16", "fp16"])
def test_masters_of_16_bits_are_shared_out_with_the_state(pool: Pools, key: str) -> None:
    pool(2).run(trains_in_16_bits_as_without, key, 1)
    if key == "bf16":
        pool(4).run(trains_in_16_bits_as_without, key, 2)


def test_what_cannot_go_with_sharded_optimizer_state_is_refused(pool: Pools) -> None:
    pool(2).run(refusals)
    pool(2).run(refuses_sparse_gradients)


def test_sharded_state_and_delayed_parameters_go_with_tensor_and_pipeline_parallelism(pool: Pools) -> None:
    for partitions in (1, 2):
        pool(4).run(goes_with_tensor_parallelism, partitions)
