"""What breaks in a pipeline ends on every rank, in time, with an error that says what and where."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import smdistributed.modelparallel.torch as smp
from opensmd.modelparallel.exceptions import SMPCheckpointError, SMPError
from tests.support.patience import PATIENCE
from tests.support.ranks import Outcome, Ranks, run_once, started
from tests.support.timeouts import expire_after, meet_in_store

STEPS = 5
WAITING = ["stopped", "control flow", "short loader"]  # whoever is sound there waits in vain
TIMEOUT = 3.0  # of waits, once both ranks have come to the fault


def loop(kind: str, rank: int) -> None:
    """A training loop in which rank 1 misbehaves in step 2, as ``kind`` says."""
    smp.init({"partitions": 2, "microbatches": 2, "auto_partition": False, "default_partition": 0})
    width = 9 if kind == "other model" and rank == 1 else 8
    module = nn.Sequential(nn.Linear(8, width), nn.ReLU(), nn.Linear(width, 8), nn.Linear(8, 1))
    smp.set_partition(module[2], 1)
    smp.set_partition(module[3], 1)
    model = smp.DistributedModel(module)
    current = 0

    @smp.step
    def train(x: Tensor) -> Tensor:
        faulty = current == 2 and rank == 1
        if current == 2 and kind == "control flow":
            expire_after(TIMEOUT)  # when both have begun the step
        if faulty and kind == "exception":
            raise ZeroDivisionError("the script's own mistake")
        if faulty and kind == "aborted":
            smp.get_mp_process_group()._get_backend(torch.device("cpu")).abort()
        if faulty and kind == "control flow":
            x = module[0](x)
        loss = model(x).square().mean()
        if faulty and kind == "killed inside":
            os.kill(os.getpid(), signal.SIGKILL)
        model.backward(loss)
        return loss  # type: ignore[no-any-return]

    @smp.step
    def evaluate(x: Tensor) -> Tensor:
        return model(x).square().mean()  # type: ignore[no-any-return]

    for current in range(STEPS):  # read by train
        if current == 2 and kind in ("stopped", "short loader"):
            meet_in_store("the fault")
            expire_after(TIMEOUT)
        if current == 2 and rank == 1:
            if kind == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            if kind == "stopped":
                os.kill(os.getpid(), signal.SIGSTOP)
            if kind == "short loader":
                break
            if kind == "other step":
                with torch.no_grad():
                    evaluate(torch.ones(4, 8))
        train(torch.ones(4, 8))


def replicas_one_of_which_fails() -> None:
    """Two replicas of two stages; the second one's ranks raise after a step, and stay alive."""
    smp.init({"partitions": 2, "microbatches": 2, "ddp": True})
    torch.manual_seed(0)
    model = smp.DistributedModel(nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8), nn.Linear(8, 1)))

    @smp.step
    def train(x: Tensor) -> None:
        model.backward(model(x).square().mean())

    for step in range(STEPS):
        if step == 1:
            meet_in_store("the fault")
            expire_after(TIMEOUT, for_rank=smp.rank() % 2 + 2)
        if step == 1 and smp.dp_rank() == 1:
            raise ZeroDivisionError("the script's own mistake")
        train(torch.ones(4, 8))


def replicas_one_of_which_does_not_save(folder: Path) -> None:
    """Two replicas of two stages, the second of which never comes to the checkpoint after a step."""
    smp.init({"partitions": 2, "microbatches": 2, "ddp": True})
    torch.manual_seed(0)
    model = smp.DistributedModel(nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8), nn.Linear(8, 1)))

    @smp.step
    def train(x: Tensor) -> None:
        model.backward(model(x).square().mean())

    train(torch.ones(4, 8))
    meet_in_store("the fault")
    if smp.dp_rank() == 1:
        return
    late = smp.rank() + 2  # the other replica's rank of the same stage
    expire_after(TIMEOUT, for_rank=late)
    # whoever is late itself is named beside it
    not_saved = rf"'s1' in .* was not saved: .*not arrived: .*\brank {late} "
    with pytest.raises(SMPCheckpointError, match=not_saved):
        smp.save_checkpoint(str(folder), "s1", partial=False, model=model)
    expire_after(10 * PATIENCE)  # a step that waited would not end
    with pytest.raises(SMPError, match="saving or loading a checkpoint failed on this process group before"):
        train(torch.ones(4, 8))


@pytest.fixture(scope="module", autouse=True)
def waiting(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Ranks]]:
    """The jobs that wait for a timeout: they begin with the first test and are asked by the last ones.

    A rank whose function has ended is still alive: it waits to be asked for more.
    """
    folder = tmp_path_factory.mktemp("checkpoints")
    with ExitStack() as stack:
        jobs = {kind: stack.enter_context(start(kind)) for kind in WAITING}
        unsaved = started(4, replicas_one_of_which_does_not_save, folder)
        yield {**jobs, "unsaved": stack.enter_context(unsaved)}


def start(kind: str) -> AbstractContextManager[Ranks]:
    arguments = [(kind, 0), (kind, 1)]
    return started(2, loop, per_rank_args=arguments)


def run(kind: str) -> list[Outcome]:
    with start(kind) as ranks:
        return ranks.answers()


def told(outcome: Outcome) -> str:
    assert outcome.kind == "error", outcome
    return str(outcome.value)


PLACES = {
    "killed": "the step 'loop.<locals>.train' stopped while the ranks agreed on its arguments: ",
    "killed inside": "the pipeline stopped: microbatch ",  # whichever had the turn
}


@pytest.mark.parametrize("kind", PLACES)
def test_a_killed_stage_is_reported_by_the_other(kind: str) -> None:
    survivor, dead = run(kind)
    assert dead.kind == "died"
    assert told(survivor).startswith(PLACES[kind])
    assert "rank 1" in told(survivor) and "died" in told(survivor)


def test_an_exception_in_one_rank_reaches_all_with_microbatch_and_place() -> None:
    other, faulty = run("exception")
    assert isinstance(faulty.value, ZeroDivisionError)
    for part in ("rank 1", "microbatch ", "the script's own mistake"):
        assert part in told(other)


def test_a_rank_whose_group_has_been_aborted_says_where_it_was() -> None:
    for outcome in run("aborted"):
        assert "the pipeline stopped: microbatch " in told(outcome)
        assert "abort() was called on rank 1" in told(outcome)


def test_ranks_that_begin_different_steps_are_told_at_once() -> None:
    for outcome in run("other step"):
        assert "'loop.<locals>.train'" in told(outcome), told(outcome)
        assert "'loop.<locals>.evaluate' without gradients" in told(outcome)


def test_different_models_are_refused_in_the_first_step() -> None:
    for outcome in run("other model"):
        assert "rank 0 has 0.weight (8, 8)" in told(outcome)
        assert "Build the same model on all ranks" in told(outcome)


def test_the_ranks_of_a_sound_loop_end_well() -> None:
    assert [outcome.kind for outcome in run("none")] == ["value", "value"]


def test_a_stopped_stage_is_reported_by_the_other_within_the_timeout(
    waiting: dict[str, Ranks],
) -> None:
    survivor, _ = waiting["stopped"].answers(silent=[1])
    assert "rank 1" in told(survivor) and "Timed out" in told(survivor)


def test_ranks_that_leave_the_common_program_say_where_they_were(waiting: dict[str, Ranks]) -> None:
    for outcome in waiting["control flow"].answers():
        assert "microbatch " in told(outcome) and "pipeline rank" in told(outcome)
        waited = re.search(r"Timed out after (\d+) ms", told(outcome))
        assert waited and int(waited[1]) >= TIMEOUT * 1000, told(outcome)  # as long as it really took


def test_a_loader_that_ends_early_is_reported_by_the_rank_that_waits(waiting: dict[str, Ranks]) -> None:
    waiting, ended = waiting["short loader"].answers()
    assert ended.kind == "value"
    assert "not arrived: rank 1" in told(waiting)


def test_no_step_waits_again_for_ranks_that_a_checkpoint_has_waited_for_in_vain(
    waiting: dict[str, Ranks],
) -> None:
    for outcome in waiting["unsaved"].answers():
        assert outcome.kind == "value", outcome


def test_replicas_wait_for_one_that_has_failed_no_longer_than_the_script_allows() -> None:
    *waiting, third, fourth = run_once(4, replicas_one_of_which_fails)
    assert all(isinstance(one.value, ZeroDivisionError) for one in (third, fourth))
    for outcome in waiting:  # the second one may be told what the first one has waited for
        waited = re.search(r"Timed out after (\d+) ms.* not arrived: rank [23]\b", told(outcome))
        assert waited and int(waited[1]) >= TIMEOUT * 1000, told(outcome)
