"""Kills ranks of one job again and again, and compares its losses with those of a run that nothing disturbs.

    python -m tests.faults.elastic --kills 20 --seed 1
    python -m tests.faults.elastic --kills 20 --seed 1 --hosts    # two hosts, as namespaces; needs root

The job is two copies of a model in two parts; smdrun starts all ranks again after each kill, and they go on
from the last checkpoint. Losses of steps that are repeated count too.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import re
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.hosts.networks import ADDRESSES, two_networks

from tests.faults.dying_rank import VARIABLE
from tests.scripts.test_several_hosts import SSH
from tests.support.jobs import start_interpreter
from tests.support.patience import PATIENCE
from tests.support.ports import free_port
from tests.support.ranks import ROOT

__all__ = ["SCRIPT", "SMALL", "Death", "Run", "losses", "run_dying"]

SCRIPT = ROOT / "examples" / "model_parallel" / "elastic.py"
DYING = ROOT / "tests" / "faults" / "dying_rank.py"
SMALL = [
    "--characters",
    "20000",
    "--width",
    "32",
    "--layers",
    "2",
    "--batch-size",
    "8",
    "--microbatches",
    "2",
]
SAVE_EVERY = 3
MOST_STEPS = 6  # of an attempt, before it is disturbed
LATEST = 0.05  # seconds after a step

Death = tuple[int, int, float]  # rank, steps of its attempt, seconds after the last


@dataclass
class Run:
    """What came of a job.

    Attributes:
        losses: every step's, with those of steps that were repeated.
        stalls: seconds from each kill to the first step that was new.
    """

    losses: list[tuple[int, float]] = field(default_factory=list)
    stalls: list[float] = field(default_factory=list)


def losses(lines: Iterable[str]) -> list[tuple[int, float]]:
    """Steps and losses that the script has printed."""
    found = (re.search(r"step (\d+): loss ([\d.]+)", line) for line in lines)
    return [(int(match[1]), float(match[2])) for match in found if match is not None]


def run_dying(
    folder: Path,
    deaths: Sequence[Death],
    *,
    place: Sequence[str],
    steps: int,
    options: Sequence[str],
    env: Mapping[str, str],
    start: Callable[..., Any] = start_interpreter,
) -> Run:
    """Run the script under smdrun, a rank of which dies in each attempt but the last.

    Args:
        folder: for what it saves.
        deaths: of its ranks.
        place: options of smdrun that say where they run.
        steps: of the script.
        options: of the script, beside these.
        env: of smdrun.
        start: starts it.

    Raises:
        RuntimeError: the job did not end well.
    """
    command = [sys.executable, "-m", "opensmd.launch.cli", *place]
    command += ["--max-restarts", str(len(deaths)), str(DYING), str(SCRIPT)]
    command += ["--folder", str(folder / "saved"), "--steps", str(steps), *options]
    full = {**env, VARIABLE: json.dumps(deaths)}
    found, newest, attempt = Run(), 0, 0
    # By attempt: ranks have pipes of their own, so a kill may be told after what the next attempt has done.
    killed: dict[int, float] = {}
    went_on: dict[int, float] = {}
    job = start(command, cwd=folder, env=full, stderr=folder / "errors")
    try:
        for line in job.stdout:
            if match := re.search(r"killed in attempt (\d+) at ([\d.]+)", line):
                killed[int(match[1])] = float(match[2])
            if match := re.search(r"attempt (\d+)$", line):
                attempt = int(match[1])
            for step, loss in losses([line]):
                found.losses.append((step, loss))
                if step > newest:
                    newest = step
                    went_on.setdefault(attempt, time.time())
        if code := job.wait(PATIENCE):
            raise RuntimeError(f"ended with {code}\n{(folder / 'errors').read_text()}")
    finally:
        job.kill()
    for dead, when in killed.items():
        later = [then for after, then in went_on.items() if after > dead]
        found.stalls += [min(later) - when] if later else []
    return found


@contextlib.contextmanager
def places(ranks: int, *, hosts: bool) -> Iterator[tuple[list[str], dict[str, str]]]:
    """Options of smdrun and variables that let so many ranks run here, or on two hosts."""
    if not hosts:
        yield ["-n", str(ranks)], {}
        return
    with two_networks() as names:
        listed = ",".join(f"{address}:{ranks // 2}" for address in ADDRESSES)
        namespaces = ",".join(map("=".join, zip(ADDRESSES, names, strict=True)))
        options = ["--hosts", listed, "--ssh", SSH, "--master-port", str(free_port())]
        yield options, {"SSH_NAMESPACES": namespaces}


def main() -> None:
    """Run the campaign and print what came of it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--hosts", action="store_true", help="half of the ranks on each of two hosts")
    args = parser.parse_args()
    chosen = random.Random(args.seed)
    deaths = [
        (chosen.randrange(args.ranks), chosen.randint(1, MOST_STEPS), chosen.uniform(0, LATEST))
        for _ in range(args.kills)
    ]
    steps = MOST_STEPS * args.kills * 2
    runs = []
    options = [*SMALL, "--save-every", str(SAVE_EVERY)]
    for planned in ([], deaths):
        with tempfile.TemporaryDirectory() as folder, places(args.ranks, hosts=args.hosts) as (place, more):
            env = {**os.environ, **more}
            runs.append(run_dying(Path(folder), planned, place=place, steps=steps, options=options, env=env))
    undisturbed, disturbed = dict(runs[0].losses), runs[1]
    apart = max(abs(loss - undisturbed[step]) for step, loss in disturbed.losses)
    stalls = disturbed.stalls
    print(f"{len(stalls)} kills in {steps} steps; {len(disturbed.losses) - steps} steps were done again")
    print(f"losses differ from the undisturbed run's by at most {apart:.1e}")
    print(f"stall per kill: mean {sum(stalls) / len(stalls):.1f} s, longest {max(stalls):.1f} s")
    if apart > 1e-5 or {step for step, _ in disturbed.losses} != set(range(1, steps + 1)):
        raise SystemExit("the losses are not those of the undisturbed run")


if __name__ == "__main__":
    main()
