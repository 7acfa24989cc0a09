"""Modules that customize their state dicts, split over ranks: what is saved loads everywhere."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import smdistributed.modelparallel.torch as smp
from opensmd.modelparallel.exceptions import SMPUnsupportedError
from tests.support.ranks import ROOT, RankPool

WIDTH = 4


class Versioned(nn.Linear):
    """Its first version kept half the weight."""

    _version = 2

    def _load_from_state_dict(self, state_dict: Any, prefix: str, metadata: Any, *others: Any) -> None:
        if metadata.get("version", 1) < 2:
            state_dict[prefix + "weight"] = 2 * state_dict[prefix + "weight"]
        super()._load_from_state_dict(state_dict, prefix, metadata, *others)


class Joined(nn.Module):
    """Saves two weights as one, under another name, and a constant."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.register_state_dict_post_hook(_join)
        self.register_load_state_dict_pre_hook(_part)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.left(x)) + torch.tanh(self.right(x))


def _join(module: nn.Module, saved: dict[str, Any], prefix: str, metadata: Any) -> None:
    weights = [saved.pop(f"{prefix}{side}.weight") for side in ("left", "right")]
    saved[f"{prefix}both"] = torch.cat(weights)
    saved[f"{prefix}kind"] = torch.tensor(7)


def _part(module: nn.Module, saved: dict[str, Any], prefix: str, *others: Any) -> None:
    assert saved.pop(f"{prefix}kind") == 7
    saved[f"{prefix}left.weight"], saved[f"{prefix}right.weight"] = saved.pop(f"{prefix}both").chunk(2)


class Net(nn.Module):
    """Renames a child on saving; replaces a buffer and counts its calls in code of its own."""

    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.first, self.joined, self.last = Versioned(WIDTH, WIDTH), Joined(), Versioned(WIDTH, WIDTH)
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.register_state_dict_post_hook(_rename)
        self.register_load_state_dict_pre_hook(_rename_back)
        self.scale = 1.0

    def forward(self, x: Tensor) -> Tensor:
        x = self.joined(torch.tanh(self.first(x)))
        self.mean = 0.5 * self.mean + 0.5 * x.detach().mean(0)
        out: Tensor = self.scale * self.last(x) + self.mean
        return out

    def get_extra_state(self) -> dict[str, float]:
        return {"scale": self.scale}

    def set_extra_state(self, state: dict[str, float]) -> None:
        self.scale = state["scale"]


def _rename(module: nn.Module, saved: dict[str, Any], prefix: str, metadata: Any) -> None:
    for name in [one for one in saved if one.startswith(f"{prefix}last.")]:
        saved[name.replace("last.", "end-", 1)] = saved.pop(name)


def _rename_back(module: nn.Module, saved: dict[str, Any], prefix: str, *others: Any) -> None:
    for name in [one for one in saved if one.startswith(f"{prefix}end-")]:
        saved[name.replace("end-", "last.", 1)] = saved.pop(name)


def build(*, seed: int) -> Net:
    torch.manual_seed(seed)
    return Net()


def batch(step: int) -> Tensor:
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(step))


def plain(module: nn.Module, steps: range) -> list[float]:
    """Losses of plain PyTorch."""
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    losses = []
    for x in map(batch, steps):
        optimizer.zero_grad()
        loss = module(x).square().mean()
        torch.autograd.backward(loss)
        optimizer.step()
        losses.append(loss.item())
    return losses


@smp.step
def train_step(model: Any, x: Tensor) -> Tensor:
    loss = model(x).square().mean()
    model.backward(loss)
    return loss


def start(*, seed: int, places: dict[str, int], stages: int) -> tuple[Any, Any]:
    smp.shutdown()
    smp.init({"partitions": stages, "auto_partition": False, "default_partition": 0})
    module = build(seed=seed)
    for name, place in places.items():
        smp.set_partition(module.get_submodule(name), min(place, stages - 1))
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(module.parameters(), lr=0.1))
    return smp.DistributedModel(module), optimizer


def train(model: Any, optimizer: Any, steps: range) -> list[float]:
    losses = []
    for x in map(batch, steps):
        optimizer.zero_grad()
        losses.append(train_step(model, x).reduce_mean().item())
        optimizer.step()
    return losses


PLACES = {"joined": 1, "last": 2}


def save(folder: str, stages: int) -> list[float]:
    model, optimizer = start(seed=1, places=PLACES, stages=stages)
    model.module.scale = 3.0
    losses = train(model, optimizer, range(2))
    smp.save(model.local_state_dict(), f"{folder}/part", partial=True)
    whole = model.state_dict()
    if smp.rank() == 0:
        smp.save(whole, f"{folder}/full", partial=False)
    mine = copy.deepcopy(model.local_state_dict())
    train(model, optimizer, range(5, 6))
    assert model.load_state_dict(mine, same_partition_load=stages == 1) == ([], [])
    return losses + train(model, optimizer, range(2, 4))


def resume(folder: str, stages: int) -> list[list[float]]:
    """From partial and full, before and after the first step."""
    found = []
    for partial in (True, False):
        for late in (True, False):
            model, optimizer = start(seed=2, places=PLACES, stages=stages)
            if late:
                train(model, optimizer, range(1))
            saved = smp.load(f"{folder}/{'part' if partial else 'full'}", partial=partial)
            assert model.load_state_dict(saved) == ([], [])
            found.append(train(model, optimizer, range(2, 4)))
            model.cpu()
            found[-1].append(model.module(batch(4)).square().mean().item())
    return found


def test_modules_that_rename_join_and_convert_what_they_save_go_on_anywhere(
    pool: Callable[[int], RankPool], tmp_path: Path
) -> None:
    whole = build(seed=1)
    whole.scale = 3.0
    wanted = plain(whole, range(4))
    wanted.append(whole(batch(4)).square().mean().item())
    for stages in (1, 2, 3):
        folder = tmp_path / str(stages)
        folder.mkdir()
        for losses in pool(stages).run(save, str(folder), stages):
            assert losses == pytest.approx(wanted[:4], rel=1e-5)
        alone = build(seed=2)
        alone.load_state_dict(torch.load(folder / "full"))
        assert plain(alone, range(2, 4)) == pytest.approx(wanted[2:4], rel=1e-5)
    for saved, loading in [(2, 3), (3, 2), (2, 1), (1, 2)]:
        for ways in pool(loading).run(resume, str(tmp_path / str(saved)), loading):
            for losses in ways:
                assert losses == pytest.approx(wanted[2:], rel=1e-5), (saved, loading)


NEEDS_SEVERAL = "is custom code that needs data of several partitions at once"


def save_what_is_on_two_ranks() -> None:
    model, optimizer = start(seed=1, places={"joined.left": 0, "joined.right": 1, "last": 2}, stages=3)
    train(model, optimizer, range(1))
    with pytest.raises(SMPUnsupportedError, match=NEEDS_SEVERAL):
        model.state_dict()


def test_what_a_hook_computes_from_tensors_of_two_ranks_is_refused_on_all(
    pool: Callable[[int], RankPool],
) -> None:
    pool(3).run(save_what_is_on_two_ranks)
    page = " ".join((ROOT / "docs" / "restrictions.md").read_text().split()).replace("> ", "")
    assert NEEDS_SEVERAL in page


class Observing(nn.Module):
    """Saves its buffer itself and not detached, as torch's observers of quantization do."""

    largest: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("largest", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.largest.copy_(torch.maximum(self.largest, x.detach().abs().max()))
        return x

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        destination[f"{prefix}largest"] = self.largest


def buffers_as_they_are(folder: Path) -> None:
    smp.shutdown()
    smp.init({"partitions": 2, "microbatches": 2, "auto_partition": False, "default_partition": 0})
    module = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), Observing())
    smp.set_partition(module[1], 1)
    smp.set_partition(module[2], 1)
    model = smp.DistributedModel(module)
    train_step(model, batch(0))
    whole = model.state_dict()
    smp.save_checkpoint(str(folder), "parts", model=model)
    smp.save(whole, str(folder / f"whole_{smp.rank()}.pt"), partial=False)
    loaded = torch.load(folder / f"whole_{smp.rank()}.pt")
    assert loaded["2.largest"] > 0 and torch.equal(loaded["2.largest"], whole["2.largest"])
    smp.resume_from_checkpoint(str(folder), "parts", load_optimizer=False)
    smp.shutdown()


def test_buffers_that_modules_save_as_they_are_load_again(
    pool: Callable[[int], RankPool], tmp_path: Path
) -> None:
    pool(2).run(buffers_as_they_are, tmp_path)
