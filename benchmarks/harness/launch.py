"""Starts the ranks of a benchmark: under an MPI's own mpiexec where MPI takes part, else plain processes."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.harness.meeting import Meeting
from benchmarks.harness.mpi import ROOT, Mpi
from benchmarks.harness.results import Results, machine
from opensmd.launch.allocator import keeping_memory

__all__ = ["Place", "cores", "run"]

FOLDERS = Path("/dev/shm")
PREFIX = "bench-"  # then the process that made the folder


@dataclass(frozen=True)
class Place:
    """Where a rank runs: what comes before its command, and the environment there."""

    command: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)


def cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0))


def run(
    module: str,
    *,
    ranks: int,
    mpi: Mpi | None,
    args: Sequence[str] = (),
    places: Sequence[Place] = (),
    timeout: float = 900,
) -> Results:
    """Run ``python -m module`` on so many ranks; return what rank 0 saved.

    Args:
        places: of the ranks, where no MPI starts them; by default here.

    Raises:
        RuntimeError: a rank failed, or the ranks did not end within ``timeout`` seconds.
    """
    _remove_leavings()
    with tempfile.TemporaryDirectory(prefix=f"{PREFIX}{os.getpid()}-", dir=FOLDERS) as folder:
        Meeting.create(Path(folder) / "meeting", ranks)
        path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        env = {**os.environ, "OMP_NUM_THREADS": "1", "BENCH_FOLDER": folder, "PYTHONPATH": path}
        command = [sys.executable, "-m", module, *args]
        if mpi is None:
            env |= keeping_memory(env)  # as smdrun starts ranks
            processes = [
                _start(
                    [*place.command, *command], {**env, **place.env, "RANK": str(r), "WORLD_SIZE": str(ranks)}
                )
                for r, place in enumerate(places or [Place()] * ranks)
            ]
        else:
            env |= {**mpi.env, "MPI4PY_LIBMPI": str(mpi.library), "BENCH_MPI": mpi.name}
            processes = [_start([str(mpi.mpiexec), "-n", str(ranks), *command], env)]
        _wait(processes, timeout)
        results = Results.load(Path(folder) / "results.json")
    results.notes = {**machine(), **results.notes}
    return results


def _remove_leavings() -> None:
    """Folders of benchmarks that were killed."""
    for left in FOLDERS.glob(f"{PREFIX}*"):
        owner = left.name.removeprefix(PREFIX).partition("-")[0]
        if owner.isdecimal() and not Path("/proc", owner).exists():
            shutil.rmtree(left, ignore_errors=True)


def _start(command: Sequence[str], env: dict[str, str]) -> subprocess.Popen[bytes]:
    """A process that the kernel ends with this one: ranks that wait for each other keep cores busy."""
    ends_with_us = ["setpriv", "--pdeathsig", "KILL"]
    return subprocess.Popen([*ends_with_us, *command], env=env, cwd=ROOT, start_new_session=True)


def _wait(processes: Sequence[subprocess.Popen[bytes]], timeout: float) -> None:
    """Until all have ended well, one has failed, or time is over; nothing is left running."""
    deadline = time.monotonic() + timeout
    try:
        while any(process.poll() is None for process in processes) and time.monotonic() < deadline:
            if any(process.returncode for process in processes):
                break
            time.sleep(0.2)
        codes = [process.returncode for process in processes]
    finally:
        for process in processes:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    if any(code != 0 for code in codes):
        raise RuntimeError(f"the ranks ended with {codes} (None: did not end in time); errors are above")
