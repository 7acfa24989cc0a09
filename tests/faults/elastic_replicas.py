"""Kills ranks of a job whose replicas come and go, again and again, compares its losses with plain PyTorch's.

    python -m tests.faults.elastic_replicas --kills 10 --seed 1

The job is two replicas of a model in two stages. A rank is killed at a random moment of its training; its
replica is started again, and joins. When both have trained together for a while, the next one is killed.
"""

from __future__ import annotations

import argparse
import os
import random
import re
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import torch

from tests.faults import elastic_replicas_job as job_script
from tests.support.jobs import start_interpreter
from tests.support.patience import PATIENCE

__all__ = ["Line", "Run", "largest_difference", "require_undisturbed", "run_killing"]

_STEP = re.compile(r"step (\d+) share (\d+)/(\d+) ended (\d+) loss ([\d.]+) at ([\d.]+)")
TOGETHER = 10  # steps that both replicas make before a kill
LATEST = 0.5  # seconds after these


class Line(NamedTuple):
    """What a replica has written of a step."""

    step: int
    rank: int
    size: int
    ended: int
    loss: float
    at: float


@dataclass
class Run:
    """What came of a job.

    Attributes:
        lines: of all steps.
        hashes: of what each stage has trained, of all ranks.
        losses: seconds from each kill to the next step of the survivors.
        joins: seconds between the two steps between which a replica has joined.
        status: the exit status.
        told: what smdrun has written about it, and errors.
    """

    lines: list[Line] = field(default_factory=list)
    hashes: dict[int, list[str]] = field(default_factory=dict)
    losses: list[float] = field(default_factory=list)
    joins: list[float] = field(default_factory=list)
    status: int = 0
    told: str = ""


def run_killing(
    folder: Path,
    kills: int,
    chosen: random.Random,
    env: Mapping[str, str],
    *,
    start: Callable[..., Any] = start_interpreter,
) -> Run:
    """Run the job under smdrun, which ``start`` starts, and kill a rank of it so many times.

    A job that takes too long is ended, so that what it has said is seen, and where its ranks are.
    """
    enough, is_missed = folder / "enough", folder / job_script.MISSED
    command = [sys.executable, "-m", "opensmd.launch.cli", "-n", "4", "--elastic-replicas", "2"]
    command += ["--max-restarts", str(kills), job_script.__file__, str(enough)]
    run = Run()
    ranks: list[int] = []
    job = start(command, cwd=Path.cwd(), env=env, stderr=folder / "told")
    too_long = threading.Timer(PATIENCE * max(1, kills), _end_hung, (job, ranks))
    too_long.start()
    try:
        together, last_kill, left = 0, 0.0, kills
        # Replicas write into pipes of their own, so that lines of before a kill may come after it, even those
        # of the loss before: only when a later step is missed may those behind it count.
        killed_after = -1
        missed: int | None = 0
        for text in job.stdout:
            if match := re.search(r"stage (\d) has (\w+)", text):
                run.hashes.setdefault(int(match[1]), []).append(match[2])
            if match := re.search(r"process (\d+)", text):
                ranks.append(int(match[1]))
            if (match := _STEP.search(text)) is None:
                continue
            line = Line(*(int(match[n]) for n in range(1, 5)), float(match[5]), float(match[6]))
            _take_time(run, line, last_kill)
            run.lines.append(line)
            if line.ended == 1 and line.step > killed_after:
                missed = max(missed or 0, line.step)
                is_missed.touch()
            if missed is None or line.step < missed:
                continue
            together = together + 1 if line.ended == 2 else 0
            if together >= 2 * TOGETHER:
                together, killed_after, missed = 0, max(each.step for each in run.lines), None
                if left == 0:
                    enough.touch()
                    continue
                left -= 1
                time.sleep(chosen.uniform(0, LATEST))
                is_missed.unlink(missing_ok=True)
                last_kill = time.time()
                os.kill(chosen.choice([rank for rank in ranks if _lives(rank)]), signal.SIGKILL)
        run.status = job.wait(PATIENCE)
        run.told = (folder / "told").read_text()
    finally:
        too_long.cancel()
        job.kill()
    return run


def _take_time(run: Run, line: Line, last_kill: float) -> None:
    """Note what the step has waited for, if it is the first since a replica was lost or has joined."""
    before = max((each for each in run.lines if each.step < line.step), default=None)
    if before is None or any(each.step == line.step for each in run.lines):
        return
    if line.ended < before.ended:
        run.losses.append(line.at - last_kill)
    if line.ended > before.ended:
        run.joins.append(line.at - before.at)


def _end_hung(job: Any, ranks: Sequence[int]) -> None:
    """End the job, once its ranks have written where they are: they do so when they are aborted."""
    for rank in filter(_lives, ranks):
        os.kill(rank, signal.SIGABRT)
    time.sleep(1)
    job.kill()


def _lives(process: int) -> bool:
    try:
        return psutil.Process(process).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def require_undisturbed(run: Run, kills: int) -> None:
    """Killed replicas came back, losses are plain PyTorch's, and both replicas end with the same bits."""
    assert run.status == 0, run.told
    assert (len(run.losses), len(run.joins)) == (kills, kills), run.told
    assert f"has ended; restart 1 of {kills}" in run.told
    assert largest_difference(run.lines) < 1e-5
    assert {stage: len(found) for stage, found in run.hashes.items()} == {0: 2, 1: 2}
    assert all(len(set(found)) == 1 for found in run.hashes.values()), run.hashes


def largest_difference(lines: Sequence[Line]) -> float:
    """Between a loss of the job and plain PyTorch's on the data of the replicas that have ended the step."""
    model = job_script.module()
    optimizer = job_script.optimizer_of(model)
    largest = 0.0
    for step in range(max(line.step for line in lines) + 1):
        own = [line for line in lines if line.step == step]
        # A replica that has ended a step may die before it says so.
        whole = own[0].ended == own[0].size
        shares = range(own[0].size) if whole else [line.rank for line in own]
        optimizer.zero_grad()
        for rank in shares:
            rows, targets = job_script.data_of(step, rank, own[0].size)
            loss = job_script.loss_of(model(rows), targets)
            (loss / len(shares)).backward()
            written = [line.loss for line in own if line.rank == rank]
            largest = max([largest, *(abs(each - loss.item()) for each in written)])
        optimizer.step()
    return largest


def main() -> None:
    """Run the campaign and print what came of it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(1)
    before = set(Path("/dev/shm").iterdir())
    with tempfile.TemporaryDirectory() as folder:
        run = run_killing(Path(folder), args.kills, random.Random(args.seed), os.environ)
    if run.status:
        raise SystemExit(f"the job ended with {run.status}\n{run.told}")
    steps = max(line.step for line in run.lines) + 1
    apart = largest_difference(run.lines)
    print(f"{args.kills} kills in {steps} steps; losses differ from plain PyTorch's by at most {apart:.1e}")
    for what, seconds in (("from a kill to the next step", run.losses), ("a step with a join", run.joins)):
        mean = sum(seconds) / max(1, len(seconds))
        print(f"{what}: {len(seconds)} times, mean {mean:.2f} s, longest {max(seconds, default=0.0):.2f} s")
    print(f"hashes of each stage's parameters on its replicas: {run.hashes}")
    print(f"left in /dev/shm: {sorted(set(Path('/dev/shm').iterdir()) - before)}")
    if apart > 1e-5 or any(len(set(each)) > 1 for each in run.hashes.values()):
        raise SystemExit("the replicas are not equal, or not those of plain PyTorch")


if __name__ == "__main__":
    main()
