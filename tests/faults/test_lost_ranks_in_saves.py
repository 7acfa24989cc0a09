"""A rank that dies while others save beside training: the save on all of these names it."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import smdistributed.modelparallel.torch as smp
from opensmd.modelparallel.checkpoint.saving import background, pacing
from opensmd.modelparallel.exceptions import SMPCheckpointError, SMPError
from tests.faults.test_lost_ranks import runs
from tests.support.patience import wait_until
from tests.support.ranks import run_once
from tests.support.timeouts import expire_after

VICTIM = 1
SERVER = 0  # of the store in which the ranks meet
STOPPED_FOR = 3.0  # seconds that groups wait for a rank that is stopped
LAYOUTS: dict[str, dict[str, Any]] = {
    "sharded": {"sharded_data_parallel_degree": 2, "ddp": True},
    "split": {"partitions": 2},
    "replicas": {"ddp": True},
}


def die(*_: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def stop(*_: object) -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def begin_a_save(folder: Path, layout: str, fault: Callable[..., None], victim: int = VICTIM) -> Any:
    """Train a step and let threads save, of which the victim's misbehaves once the other rank's is at work.

    Before that a sound save makes groups, for which the other rank needs the store that the victim may serve,
    and more time than it has for a rank that is stopped. When this returns there, the victim has misbehaved.
    """
    smp.init(LAYOUTS[layout])
    model = smp.DistributedModel(nn.Sequential(*[nn.Linear(300, 300) for _ in range(2)]))
    optimizer = smp.DistributedOptimizer(torch.optim.Adam(model.parameters(), lr=0.1))

    @smp.step
    def step(x: torch.Tensor) -> None:
        model.backward(model(x).sum())

    step(torch.ones(4, 300))
    optimizer.step()
    at_work, pid = (folder.with_name(f"{folder.name}-{name}") for name in ("at-work", "pid"))
    usual = list(dist.distributed_c10d._world.pg_map)
    smp.save_checkpoint(str(folder.with_name("sound")), "zero", user_content=0, blocking=False).wait()

    def misbehave(*_: object) -> None:
        while not at_work.exists():
            time.sleep(0.01)
        fault()

    if smp.rank() == victim:
        pid.write_text(str(os.getpid()))
        background.write_snapshot = misbehave  # in the thread
    dist.barrier()
    if fault is stop:
        expire_after(STOPPED_FOR, groups=usual)  # those of saves wait longer
    save = smp.save_checkpoint(str(folder), "one", model=model, optimizer=optimizer, blocking=False)
    if smp.rank() != victim:
        at_work.touch()
        wait_until(lambda: not runs(int(pid.read_text())))
    return save


def require_survivor(victim: int, function: Callable[..., None], *args: Any, **options: Any) -> None:
    """Run ``function`` on two ranks, one of which falls silent; the other must come to its end."""
    outcomes = run_once(2, function, *args, silent=[victim], **options)
    survivor = outcomes[1 - victim]
    assert survivor.kind == "value", survivor.text


def saves_until_a_rank_dies(folder: Path, layout: str) -> None:
    save = begin_a_save(folder, layout, die)
    with pytest.raises(SMPCheckpointError, match=rf"'one' .* was not saved: .*rank {VICTIM}\b.* died"):
        save.wait()
    assert not (folder / "newest").exists()
    dist.destroy_process_group()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_rank_that_dies_while_a_thread_saves_is_named_by_the_others(tmp_path: Path, layout: str) -> None:
    require_survivor(VICTIM, saves_until_a_rank_dies, tmp_path, layout)


def waits_for_a_rank_that_is_stopped(folder: Path, layout: str, victim: int) -> None:
    save = begin_a_save(folder, layout, stop, victim)
    named = rf"'one' .* was not saved: .* for \d+ s.* rank {victim} \(its process is stopped\)"
    with pytest.raises(SMPCheckpointError, match=named):
        save.wait()
    assert not save.done
    save.wait()  # says it once, and does not wait again
    if layout == "split":  # it waits once more for as long, in a group that is the same in every layout
        with pytest.raises(SMPError):
            smp.save_checkpoint(str(folder), "two", user_content=1)
    smp.shutdown()  # does not wait for the thread


@pytest.mark.parametrize("victim", [VICTIM, SERVER])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_rank_that_is_stopped_while_a_thread_saves_is_named_at_the_groups_timeout(
    tmp_path: Path, layout: str, victim: int
) -> None:
    require_survivor(victim, waits_for_a_rank_that_is_stopped, tmp_path, layout, victim)


def waits_while_the_thread_asks_a_stopped_store(folder: Path) -> None:
    pacing.BUSY, pacing.PIECE, pacing.SHARE = 0.0, 0.0, 1e-9  # rest, and ask whether others wait
    save = begin_a_save(folder, "sharded", stop, SERVER)
    asked = time.monotonic() + 10 * pacing.LOOK
    while time.monotonic() < asked:
        time.sleep(pacing.LOOK)
    with pytest.raises(
        SMPCheckpointError, match=rf"was not saved: .*rank {SERVER} \(its process is stopped\)"
    ):
        save.wait()


def test_a_wait_ends_though_the_thread_waits_for_the_answer_of_a_store_that_is_stopped(
    tmp_path: Path,
) -> None:
    require_survivor(SERVER, waits_while_the_thread_asks_a_stopped_store, tmp_path)


def names_who_does_not_make_the_groups_of_a_save(folder: Path, victim: int, complaint: str) -> None:
    smp.init(LAYOUTS["split"])
    if smp.rank() == victim:
        background._make_groups = stop
    dist.barrier()
    expire_after(STOPPED_FOR)
    with pytest.raises(dist.DistBackendError, match=complaint):
        smp.save_checkpoint(str(folder), "one", user_content=1, blocking=False)


@pytest.mark.parametrize(
    ("victim", "complaint"),
    [
        (VICTIM, rf"rank {VICTIM} did not join within {STOPPED_FOR:g} s"),
        (SERVER, rf"did not answer within {STOPPED_FOR:g} s .* The process that serves it is stopped"),
    ],
)
def test_a_rank_that_is_stopped_before_the_groups_of_a_save_are_made_is_named_at_the_timeout(
    tmp_path: Path, victim: int, complaint: str
) -> None:
    require_survivor(victim, names_who_does_not_make_the_groups_of_a_save, tmp_path, victim, complaint)
