"""Checkpoints of models on CUDA: saves beside training, files, and where what is loaded comes to be."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import smdistributed.modelparallel.torch as smp
from tests.support.cuda import DEVICE, CudaRanks
from tests.support.partitioned import restart

Gpus = Callable[[int], CudaRanks]
WIDTH = 300  # weights of 360 kB: large enough to be copied beside training
ROWS = 4


class Training:
    """A script's model with dropout, its optimizer and its step, on the GPU."""

    def __init__(self, seed: int = 0, partitions: int = 2, **settings: Any) -> None:
        restart(partitions=partitions, microbatches=2, ddp=True, **settings)
        torch.manual_seed(seed)
        layers = [nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Dropout(0.1), nn.Linear(WIDTH, WIDTH)]
        net = nn.Sequential(*layers).to(DEVICE)
        self.model = model = smp.DistributedModel(net)
        self.optimizer = smp.DistributedOptimizer(torch.optim.AdamW(net.parameters(), lr=0.01))

        @smp.step
        def step(x: Tensor) -> Tensor:
            loss: Tensor = model(x).square().mean()
            model.backward(loss)
            return loss

        self.step = step

    def train(self, number: int) -> float:
        x = torch.linspace(-1, 1, ROWS * WIDTH, device=DEVICE).view(ROWS, WIDTH).roll(number)
        self.optimizer.zero_grad()
        loss = float(self.step(x).reduce_mean())
        self.optimizer.step()
        return loss

    def state(self) -> tuple[dict[str, Any], dict[str, Any]]:
        return copy.deepcopy((dict(self.model.state_dict()), self.optimizer.state_dict()))

    def require_on_gpu(self) -> None:
        tensors = [*self.model.local_parameters()]
        tensors += [
            each for entries in self.optimizer.state.values() for each in entries.values() if each.dim()
        ]
        assert {each.device.type for each in tensors} == {DEVICE}


def require_equal(one: Any, other: Any) -> None:
    torch.testing.assert_close(one, other, rtol=0, atol=0, check_device=False)


def beside_training(folder: str, settings: dict[str, Any]) -> None:
    """Each save has the values of its call, though the next steps change them before it is written."""
    training = Training(**settings)
    wanted = []
    saves = []
    for number in range(3):
        training.train(number)
        wanted.append(training.state())
        saves.append(
            smp.save_checkpoint(
                folder, f"t{number}", model=training.model, optimizer=training.optimizer, blocking=False
            )
        )
        for more in range(2):
            training.train(10 * number + more)
    for save in saves:
        assert save is not None
        save.wait()
    smp.barrier()
    for number, (model, optimizer) in enumerate(wanted):
        again = Training(seed=5, **settings)
        again.train(0)
        smp.resume_from_checkpoint(folder, f"t{number}")
        require_equal(dict(again.model.state_dict()), model)
        require_equal(again.optimizer.state_dict()["state"], optimizer["state"])
        again.require_on_gpu()


@pytest.mark.parametrize(
    "settings",
    [{}, {"partitions": 1}, {"partitions": 1, "shard_optimizer_state": True}],
    ids=["split", "replicas", "sharded state"],
)
def test_a_save_beside_training_has_the_values_of_its_call(
    gpus: Gpus, tmp_path: Path, settings: dict[str, Any]
) -> None:
    gpus(2).run(beside_training, str(tmp_path), settings)


def goes_on(folder: str) -> None:
    """Training that was saved goes on as if undisturbed, random numbers of the GPU included."""
    training = Training()
    training.train(0)
    smp.save_checkpoint(folder, "one", model=training.model, optimizer=training.optimizer)
    wanted = [training.train(number) for number in (1, 2)]
    for first in (False, True):
        again = Training(seed=7)
        if first:
            again.train(0)
        smp.resume_from_checkpoint(folder, "one")
        found = [again.train(number) for number in (1, 2)]
        assert found == pytest.approx(wanted, rel=1e-6), first
        again.require_on_gpu()


def test_training_goes_on_as_if_undisturbed(gpus: Gpus, tmp_path: Path) -> None:
    gpus(2).run(goes_on, str(tmp_path))


def files(folder: str) -> None:
    """``smp.save`` and ``smp.load`` of whole and partial states, and where they are when they come back."""
    training = Training()
    training.train(0)
    model, optimizer = training.model, training.optimizer
    smp.save(
        {"model": model.local_state_dict(), "opt": optimizer.local_state_dict()},
        f"{folder}/part",
        partial=True,
    )
    smp.save({"model": model.state_dict(), "opt": optimizer.state_dict()}, f"{folder}/full", partial=False)
    wanted = training.state()
    smp.barrier()
    for name in ("part", "full"):
        again = Training(seed=3)
        again.train(0)
        found = smp.load(f"{folder}/{name}", partial=name == "part")
        again.model.load_state_dict(found["model"])
        again.optimizer.load_state_dict(found["opt"])
        require_equal(again.state()[0], wanted[0])
        require_equal(again.state()[1]["state"], wanted[1]["state"])
        again.require_on_gpu()
        again.train(1)
    plain = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Dropout(0.1), nn.Linear(WIDTH, WIDTH))
    plain.load_state_dict(torch.load(f"{folder}/full", map_location="cpu")["model"])
    require_equal(plain.state_dict(), wanted[0])
    whole = again.model.cpu()
    assert {each.device.type for each in whole.get_module().parameters()} == {"cpu"}


def test_files_of_states_are_loaded_to_the_gpu(gpus: Gpus, tmp_path: Path) -> None:
    gpus(2).run(files, str(tmp_path))
