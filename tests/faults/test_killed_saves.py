"""Jobs that are killed at moments nobody chose, while they save again and again."""

from __future__ import annotations

import os
import random
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import smdistributed.modelparallel.torch as smp
from opensmd.modelparallel import communicate
from opensmd.modelparallel.checkpoint.folder import resume_from_checkpoint, save_checkpoint
from opensmd.modelparallel.checkpoint.save_load import load, save
from opensmd.modelparallel.checkpoint.saving.background import finish_background_save
from opensmd.modelparallel.optimizer import DistributedOptimizer
from opensmd.modelparallel.state import state
from opensmd.modelparallel.state_dicts.model_state import ModelState
from tests.support.partitioned import restart, split
from tests.support.patience import PATIENCE
from tests.support.ranks import RankPool, Ranks, run_once

SNAPSHOTS = 20
FULL = ("full", "full, background")
BACKGROUND = ("background", "full, background", "sharded, background")


class Counting(torch.optim.SGD):
    """Its step makes everything one more, as soon as it may."""

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for parameter in (each for group in self.param_groups for each in group["params"]):
            parameter += 1
            self.state[parameter]["momentum_buffer"] += 1


def trainee() -> tuple[ModelState, Any]:
    """A model and an optimizer whose tensors all have one value, the generation."""
    model = ModelState(
        nn.Sequential(nn.Linear(200, 600), nn.Linear(600, 40))
    )  # large: copied beside training
    for parameter in model.parameters():
        nn.init.zeros_(parameter)
    plain_optimizer = Counting(model.parameters(), lr=0.1, momentum=0.9)
    for parameter in model.parameters():
        plain_optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
    state.model = model
    optimizer = DistributedOptimizer(plain_optimizer)
    split(model)
    return model, optimizer


class Minus(nn.Module):
    """Its parameters have gradients of -1, and so they are known after any number of steps."""

    def __init__(self) -> None:
        super().__init__()
        self.large = nn.Parameter(torch.zeros(400, 300))
        self.odd = nn.Parameter(torch.zeros(7, 5))

    def forward(self, x: Tensor) -> Tensor:
        return -(self.large.sum() + self.odd.sum()) * x.mean()


def sharded_trainee() -> tuple[ModelState, Any]:
    """One whose parameters two ranks share out: after generation g its momentum is -g."""
    model = smp.DistributedModel(Minus())
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1.0, momentum=1.0))
    return model, optimizer


def begin(kind: str) -> tuple[ModelState, Any]:
    if not kind.startswith("sharded"):
        restart(partitions=2)
        return trainee()
    restart(ddp=True, sharded_data_parallel_degree=2, sdp_gradient_clipping=0.0)
    return sharded_trainee()


def next_generation(kind: str, model: ModelState, optimizer: Any) -> None:
    if kind.startswith("sharded"):
        optimizer.zero_grad()
        minus_step(model, torch.ones(2))
    optimizer.step()


@smp.step
def minus_step(model: Any, x: Tensor) -> None:
    model.backward(model(x))


def values_of(kind: str, generation: int) -> set[float]:
    """What the elements are that one rank has."""
    sum_of_all = generation * (generation + 1) / 2
    return {sum_of_all, -generation} if kind.startswith("sharded") else {generation}


def own_tensors(model: ModelState, optimizer: Any) -> list[Tensor]:
    own = [*model.local_parameters(), *(moments["momentum_buffer"] for moments in optimizer.state.values())]
    return [each.to_local() if isinstance(each, DTensor) else each for each in own]


def save_generation(folder: str, kind: str, generation: int, model: ModelState, optimizer: Any) -> None:
    next_generation(kind, model, optimizer)
    if kind == "save":
        parts = {"model": model.local_state_dict(), "optimizer": optimizer.local_state_dict()}
        save({**parts, "generation": generation}, f"{folder}/g.pt")
    elif kind not in FULL:
        save_checkpoint(
            folder,
            f"s{generation}",
            model=model,
            optimizer=optimizer,
            user_content=generation,
            num_kept_partial_checkpoints=2,
            blocking=kind not in BACKGROUND,
        )
    else:
        save_checkpoint(
            folder,
            f"s{generation}",
            partial=False,
            model=model,
            user_content=generation,
            blocking=kind not in BACKGROUND,
        )


def save_for_ever(folder: str, kind: str) -> None:
    model, optimizer = begin(kind)
    for generation in range(1, 1_000_000):
        save_generation(folder, kind, generation, model, optimizer)
        communicate.barrier()
        if state.rank == 0:
            done = Path(folder) / "done"
            done.with_suffix(".new").write_text(str(generation))
            done.with_suffix(".new").replace(done)


def resume(folder: str, kind: str) -> int:
    """Load what is there, check that all of it is of one generation, and save the next one over it."""
    model, optimizer = begin(kind)
    if kind == "save":
        found = load(f"{folder}/g.pt")
        generation = found["generation"]
        model.load_state_dict(found["model"])
        optimizer.load_state_dict(found["optimizer"])
    else:
        generation = resume_from_checkpoint(folder, partial=kind not in FULL)
    loaded = list(model.local_parameters()) if kind in FULL else own_tensors(model, optimizer)
    found = {value for tensor in loaded for value in tensor.unique().tolist()}
    assert found == values_of(kind, generation), generation
    save_generation(folder, kind, generation + 1, model, optimizer)
    finish_background_save()
    left = [
        path for path in Path(folder).rglob(".*") if kind in ("save", *FULL) or path.parent == Path(folder)
    ]
    assert not left, "the next save takes away what the killed one has left"
    return int(generation)


def stop(pids: list[int]) -> None:
    """Hold processes where they are, for certain."""
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    for pid in pids:
        while Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "T":
            time.sleep(0.001)


def _done(job: Path) -> int:
    done = job / "done"
    return int(done.read_text()) if done.exists() else 0


@pytest.mark.parametrize("kind", ["save", "partial", "full", "sharded", *BACKGROUND])
def test_a_job_killed_at_any_moment_of_saving_resumes_from_the_last_or_the_next_save(
    pool: Callable[[int], RankPool], tmp_path: Path, kind: str
) -> None:
    """What is on the disk while all ranks are stopped is what a kill at that moment leaves."""
    job = tmp_path / "job"
    job.mkdir()
    folders = []

    def watch(ranks: Ranks) -> None:
        deadline = time.monotonic() + PATIENCE
        # of a save in the background, only the second one says that the first is whole
        while _done(job) < 2 and time.monotonic() < deadline:
            time.sleep(0.005)
        for number in range(SNAPSHOTS):
            time.sleep(random.uniform(0.0, 0.06))
            stop(ranks.pids)
            folders.append(tmp_path / f"copy{number}")
            shutil.copytree(job, folders[-1])
            for pid in ranks.pids:
                os.kill(pid, signal.SIGCONT)
        for pid in ranks.pids:
            os.kill(pid, signal.SIGKILL)

    run_once(2, save_for_ever, str(job), kind, backend="gloo", meanwhile=watch)
    assert len(folders) == SNAPSHOTS
    for folder in [*folders, job]:
        done = int((folder / "done").read_text())
        for name in ("done", "done.new"):
            (folder / name).unlink(missing_ok=True)
        found = pool(2).run(resume, str(folder), kind, backend="gloo")
        # A save in the background is done when the next one begins.
        known = (done - 1, done, done + 1) if kind in BACKGROUND else (done, done + 1)
        assert found[0] == found[1] and found[0] in known
