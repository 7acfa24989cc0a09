"""Jobs that are killed at moments nobody chose, while they save again and again."""

from __future__ import annotations

import itertools
import os
import random
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.faults.saving_jobs import KINDS, resume, save_for_ever
from tests.support.patience import PATIENCE
from tests.support.ranks import RankPool, Ranks, run_once

SNAPSHOTS = 12


def stop(pids: list[int]) -> None:
    """Hold processes where they are, for certain."""
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    for pid in pids:
        while any(map(_goes_on, Path(f"/proc/{pid}/task").iterdir())):
            time.sleep(0.001)


def _goes_on(thread: Path) -> bool:
    try:
        return (thread / "stat").read_text().rpartition(")")[2].split()[0] != "T"
    except (FileNotFoundError, ProcessLookupError):  # it has ended since it was listed
        return False


def _done(job: Path) -> int:
    done = job / "done"
    return int(done.read_text()) if done.exists() else 0


@pytest.mark.parametrize("name", KINDS)
def test_a_job_killed_at_any_moment_of_saving_resumes_from_the_last_or_the_next_save(
    pool: Callable[[int], RankPool], tmp_path: Path, name: str
) -> None:
    """What is on the disk while all ranks are stopped is what a kill at that moment leaves."""
    kind = KINDS[name]
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

    run_once(kind.ranks, save_for_ever, str(job), kind, backend="gloo", meanwhile=watch)
    assert len(folders) == SNAPSHOTS
    folders.append(job)
    told = [int((folder / "done").read_text()) for folder in folders]
    for folder, leftover in itertools.product(folders, ("done", "done.new")):
        (folder / leftover).unlink(missing_ok=True)
    first, *others = pool(kind.ranks).run(resume, list(map(str, folders)), kind, backend="gloo")
    assert all(other == first for other in others)
    for done, found in zip(told, first, strict=True):
        # A save in the background is done when the next one begins.
        assert found in ((done - 1, done, done + 1) if kind.is_in_background else (done, done + 1))
