"""Saves beside training: who waits for them, and what they have."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import smdistributed.modelparallel.torch as smp
from opensmd.modelparallel.checkpoint.saving import background, pacing, saving_thread, writing
from opensmd.modelparallel.exceptions import SMPCheckpointError
from opensmd.modelparallel.runtime.tensors import before_writing
from tests.support.equality import Pools
from tests.support.partitioned import restart


def one_waits(folder: str, waiting: int) -> bool:
    """Wait on one rank for saves that all write so slowly that they would not end in this test."""
    restart(ddp=True, sharded_data_parallel_degree=2)
    model = smp.DistributedModel(nn.Sequential(nn.Linear(500, 500), nn.Linear(500, 500)))
    optimizer = smp.DistributedOptimizer(torch.optim.Adam(model.parameters(), lr=0.1))

    @smp.step
    def step(rows: torch.Tensor) -> None:
        model.backward(model(rows).square().mean())

    step(torch.ones(4, 500))
    optimizer.step()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pacing, "PIECE", 0.0)
        patch.setattr(pacing, "BUSY", 0.0)  # always
        patch.setattr(pacing, "SHARE", 1e-9)
        save = smp.save_checkpoint(folder, "one", model=model, optimizer=optimizer, blocking=False)
        if smp.rank() == waiting:
            save.wait()
        smp.barrier()
        save.wait()
    return (Path(folder) / "newest").exists()


@pytest.mark.parametrize("waiting", [0, 1])
def test_a_rank_that_waits_for_a_save_alone_hurries_all_others(
    pool: Pools, tmp_path: Path, waiting: int
) -> None:
    assert pool(2).run(one_waits, str(tmp_path), waiting) == [True, True]


def saved_layouts(folder: str) -> list[bool]:
    """Whether the state of a convolution lies like its weight in a checkpoint that a thread has written."""
    restart()
    module = nn.Conv2d(2, 2, 2).to(memory_format=torch.channels_last)
    model = smp.DistributedModel(module)
    optimizer = smp.DistributedOptimizer(torch.optim.Adam(model.parameters()))

    @smp.step
    def step(images: torch.Tensor) -> None:
        model.backward(model(images).square().mean())

    step(torch.ones(1, 2, 4, 4))
    optimizer.step()
    saving = {"partial": False, "optimizer": optimizer, "blocking": False}
    for tag in ("one", "two"):  # the second reuses the first one's memory
        smp.save_checkpoint(folder, tag, **saving).wait()
    found = [torch.load(f"{folder}/optimizer_{tag}")["state"][0]["exp_avg"] for tag in ("one", "two")]
    return [each.stride() == module.weight.stride() for each in found]


def test_copies_lie_in_memory_like_what_is_saved(pool: Pools, tmp_path: Path) -> None:
    assert pool(1).run(saved_layouts, str(tmp_path)) == [[True, True]]


def saved_after_an_interrupt(folder: str) -> tuple[bool, Any]:
    """Save again after a wait was interrupted; whether the first save has ended, and what it has."""
    restart()
    held = threading.Event()

    def late(*arguments: Any) -> None:
        held.wait()
        writing.write_snapshot(*arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(background, "write_snapshot", late)
        content = {"numbers": torch.zeros(3)}
        first = smp.save_checkpoint(folder, "one", user_content=content, blocking=False)
        content["numbers"] = torch.ones(3)
        with patch.context() as interrupting, pytest.raises(KeyboardInterrupt):
            interrupting.setattr(first, "_outcome", interrupted)
            smp.save_checkpoint(folder, "two", user_content=content, blocking=False)
        threading.Timer(0.2, held.set).start()
        smp.save_checkpoint(folder, "two", user_content=content, blocking=False).wait()
    return first.done, smp.resume_from_checkpoint(folder, "one")["numbers"].tolist()


def interrupted() -> None:
    raise KeyboardInterrupt


def test_a_save_after_an_interrupt_waits_for_the_one_in_flight(pool: Pools, tmp_path: Path) -> None:
    assert pool(1).run(saved_after_an_interrupt, str(tmp_path)) == [(True, [0.0, 0.0, 0.0])]


def forked_beside_a_save(folder: str) -> tuple[int, bool]:
    """How a child ends that is forked beside a save, and whether the parent's save ends."""
    restart()
    parameter = nn.Parameter(torch.zeros(200, 200))
    optimizer = torch.optim.SGD([parameter], 0.1)
    held = threading.Event()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(background, "write_snapshot", lambda *_: held.wait())
        save = smp.save_checkpoint(folder, "one", user_content=1, blocking=False)
        reader = before_writing.Reader(held.wait)
        child = os.fork()
        if child == 0:
            signal.alarm(5)  # ends a child that waits
            try:
                optimizer.step()
                assert background._saver is None
                with pytest.raises(SMPCheckpointError, match="of which this is a fork"):
                    save.wait()
            except BaseException:
                os._exit(1)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        held.set()
        reader.close()
        save.wait()
    return status, save.done


def test_a_fork_does_not_wait_for_its_parents_save(pool: Pools, tmp_path: Path) -> None:
    assert pool(1).run(forked_beside_a_save, str(tmp_path)) == [(0, True)]


def elsewhere(folder: str) -> list[str]:
    """A script that goes to another folder after its save has begun."""
    restart(partitions=2)
    model = smp.DistributedModel(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)))
    smp.step(lambda rows: model(rows))(torch.ones(4, 4))
    before = Path.cwd()
    os.chdir(folder)
    try:
        save = smp.save_checkpoint("saved", "one", model=model, blocking=False)
        os.chdir(before)
        save.wait()
    finally:
        os.chdir(before)
    smp.barrier()
    return sorted(file.name for file in (Path(folder) / "saved").iterdir())


def test_a_relative_path_is_that_of_the_call(pool: Pools, tmp_path: Path) -> None:
    assert pool(2).run(elsewhere, str(tmp_path)) == [["newest", "one_partial"]] * 2


def in_other_groups(folder: str) -> tuple[int, list[str]]:
    """Save before and after the groups are made anew; how many threads there are then, and what is saved."""
    restart(ddp=True)
    smp.save_checkpoint(folder, "one", user_content=1, blocking=False)
    smp.init({"ddp": True, "partitions": 2})
    save = smp.save_checkpoint(folder, "two", user_content=2, blocking=False)
    save.wait()
    smp.barrier()
    threads = [thread for thread in threading.enumerate() if thread.name == saving_thread.NAME]
    return len(threads), sorted(file.name for file in Path(folder).iterdir())


def test_groups_that_are_made_anew_leave_no_thread_of_the_old_ones_saves(pool: Pools, tmp_path: Path) -> None:
    assert pool(2).run(in_other_groups, str(tmp_path)) == [(1, ["newest", "one_partial", "two_partial"])] * 2
