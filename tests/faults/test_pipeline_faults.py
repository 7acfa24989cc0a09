"""What breaks in a pipeline ends on every rank, in time, with an error that says what and where."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import smdistributed.modelparallel.torch as smp
from tests.support.ranks import Outcome, run_once

STEPS = 6
TIMEOUT = 5.0  # of the process groups
PATIENCE = 45.0  # until a rank that has not ended counts as hung; includes start and the first step


def loop(kind: str, rank: int) -> None:
    """A training loop in which rank 1 misbehaves in step 2, as ``kind`` says."""
    smp.init({"partitions": 2, "microbatches": 2, "auto_partition": False, "default_partition": 0})
    width = 9 if kind == "other model" and rank == 1 else 8
    layers = [nn.Linear(8, width), nn.ReLU(), nn.Linear(width, 8), nn.Linear(8, 1)]
    module = nn.Sequential(*layers)
    smp.set_partition(module[2], 1)
    smp.set_partition(module[3], 1)
    model = smp.DistributedModel(module)
    current = 0

    @smp.step
    def train(x: Tensor) -> Tensor:
        faulty = current == 2 and rank == 1
        if faulty and kind == "exception":
            raise ZeroDivisionError("the script's own mistake")
        if faulty and kind == "control flow":
            x = module[0](x)
        loss = model(x).square().mean()
        model.backward(loss)
        return loss

    for current in range(STEPS):  # read by train
        if current == 2 and rank == 1:
            if kind == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            if kind == "stopped":
                os.kill(os.getpid(), signal.SIGSTOP)
            if kind == "short loader":
                break
        train(torch.ones(4, 8))
    if kind == "short loader" and rank == 1:
        time.sleep(TIMEOUT * 2)  # alive, but never in a step again


def run(kind: str, meanwhile: Any = None) -> list[Outcome]:
    return run_once(
        2,
        loop,
        per_rank_args=[(kind, 0), (kind, 1)],
        timeout=PATIENCE,
        group_timeout=TIMEOUT,
        meanwhile=meanwhile,
    )


def test_a_killed_stage_is_reported_by_the_other() -> None:
    survivor, dead = run("killed")
    assert dead.kind == "died"
    assert survivor.kind == "error", survivor
    assert "rank 1" in str(survivor.value)


def test_a_stopped_stage_is_reported_by_the_other_within_the_timeout() -> None:
    survivor, _ = run("stopped")
    assert survivor.kind == "error", survivor
    assert "rank 1" in str(survivor.value)


def test_an_exception_in_one_rank_reaches_all() -> None:
    other, faulty = run("exception")
    assert isinstance(faulty.value, ZeroDivisionError)
    assert other.kind == "error", other
    text = str(other.value)
    assert "rank 1" in text and "microbatch" in text and "the script's own mistake" in text


@pytest.mark.parametrize("kind", ["control flow", "other model", "short loader"])
def test_ranks_that_disagree_end_with_an_error_on_every_rank_that_waits(kind: str) -> None:
    outcomes = run(kind)
    waiting = outcomes[:1] if kind == "short loader" else outcomes
    for outcome in waiting:
        assert outcome.kind == "error", (kind, outcome, outcome.text)
    assert any("rank" in str(outcome.value) for outcome in waiting)


def test_the_ranks_of_a_sound_loop_end_well() -> None:
    assert [outcome.kind for outcome in run("none")] == ["value", "value"]
