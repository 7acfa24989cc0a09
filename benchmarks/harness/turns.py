"""Jobs that are there at the same time and make their steps in turn, so that all meet the same machine.

A folder a job: before a step its first rank waits for the file ``go``, and takes it away when the step is
done. Ranks that wait sleep.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = ["Started", "found_in_turn", "turns_of"]

ROOT = Path(__file__).resolve().parents[2]
LOOK = 0.002  # seconds between looks at files


@dataclass(frozen=True)
class Started:
    """What is run: ``python -m benchmarks...`` style scripts of ranks.

    Attributes:
        ranks: of the job.
        arguments: the script and what it is given; the job's folder comes behind.
        variables: of its environment, besides.
    """

    ranks: int
    arguments: Sequence[str]
    variables: Mapping[str, str]


def found_in_turn(jobs: Mapping[str, Started], steps: int) -> dict[str, Any]:
    """What each job's first rank has written at its end, after so many steps of all in turn."""
    with ExitStack() as stack:
        folders = {name: Path(stack.enter_context(tempfile.TemporaryDirectory())) for name in jobs}
        processes = {name: stack.enter_context(_started(job, folders[name])) for name, job in jobs.items()}
        for name, process in processes.items():
            _wait(lambda ready=folders[name] / "ready": ready.exists(), process)
        order = list(jobs)
        for _ in range(steps):
            random.shuffle(order)
            for name in order:
                go = folders[name] / "go"
                go.touch()
                _wait(lambda go=go: not go.exists(), processes[name])
        for name, process in processes.items():
            (folders[name] / "end").touch()
            if process.wait():
                raise SystemExit(f"the job {name!r} has failed")
        return {name: json.loads((folders[name] / "found.json").read_text()) for name in jobs}


def _started(job: Started, folder: Path) -> subprocess.Popen[bytes]:
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    command = [sys.executable, "-m", "opensmd.launch.cli", "-n", str(job.ranks), *job.arguments, str(folder)]
    return subprocess.Popen(command, env={**os.environ, "PYTHONPATH": path, **job.variables})


def _wait(until: Callable[[], bool], process: subprocess.Popen[bytes]) -> None:
    while not until():
        if process.poll() is not None:
            raise SystemExit(f"a job has ended with status {process.returncode}")
        time.sleep(LOOK)


def turns_of(folder: Path, agreed: Callable[[bool], bool], *, first: bool) -> Iterator[None]:
    """In a rank: yields once a step, when it is this job's turn.

    Args:
        agreed: what the first rank says, on all ranks.
        first: this is it.
    """
    if first:
        (folder / "ready").touch()
    while agreed(_is_our_turn(folder) if first else False):
        yield
        if first:
            (folder / "go").unlink()


def _is_our_turn(folder: Path) -> bool:
    while not (folder / "go").exists():
        if (folder / "end").exists():
            return False
        time.sleep(LOOK)
    return True
