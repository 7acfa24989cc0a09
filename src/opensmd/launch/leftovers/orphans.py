"""Ending all processes of a job: the launcher adopts what its ranks leave behind, and ends it.

When a rank is killed, its children (DataLoader workers, subprocesses) become children of process 1, out of
reach. A launcher that is a "child subreaper" gets them instead, and finds them among its descendants; those
that end by themselves it has to reap, as process 1 would. If the launcher itself is dead, processes are
recognized by a variable that they inherited.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
import threading
from collections.abc import Collection, Iterator
from contextlib import contextmanager

import psutil

__all__ = ["JOB", "adopt", "end_all", "end_job", "reaped", "signal_children"]

JOB = "SMDRUN_JOB"  # the id of the job that a process belongs to, in its environment
_PR_SET_CHILD_SUBREAPER = 36
GRACE = 2.0  # seconds between SIGTERM and SIGKILL
REAP_EVERY = 1.0  # seconds
ROUNDS = 5  # each finds what processes have started while being ended


def adopt() -> None:
    """Make orphans among this process's descendants its own children from now on."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1)


@contextmanager
def reaped() -> Iterator[None]:
    """Reap adopted processes that end, which would otherwise stay as zombies.

    The ranks, for which their agent waits, lead process groups of their own; what they have started does not.
    """
    over = threading.Event()

    def reap() -> None:
        while not over.wait(REAP_EVERY):
            with contextlib.suppress(ProcessLookupError, ChildProcessError):  # another thread was quicker
                while (ended := _ended_child()) is not None and os.getpgid(ended) != ended:
                    os.waitpid(ended, 0)

    reaper = threading.Thread(target=reap, name="smdrun-orphans", daemon=True)
    reaper.start()
    try:
        yield
    finally:
        over.set()
        reaper.join()


def _ended_child() -> int | None:
    """Return a child that has ended but has not been reaped."""
    ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    return ended.si_pid if ended is not None else None


def end_all(*, spare: Collection[int]) -> None:
    """End every descendant of this process, at first politely.

    Args:
        spare: ids of children to leave alone.
    """
    _end([process for process in psutil.Process().children(recursive=True) if process.pid not in spare])


def signal_children(number: int, *, spare: Collection[int] = ()) -> None:
    """Send a signal to this process's own children; whoever started them learns how they end.

    Args:
        number: the signal.
        spare: ids of children to leave out.
    """
    for process in psutil.Process().children():
        if process.pid not in spare:
            with contextlib.suppress(psutil.Error):
                process.send_signal(number)


def end_job(job: str) -> None:
    """End every process that was started within a job, with its children."""
    for _ in range(ROUNDS):
        members = {process for process in psutil.process_iter() if _belongs(process, job)}
        if not members:
            return
        for process in list(members):
            with contextlib.suppress(psutil.Error):
                members.update(process.children(recursive=True))
        _end(list(members))


def _belongs(process: psutil.Process, job: str) -> bool:
    if process.pid == os.getpid():
        return False
    try:
        return process.environ().get(JOB) == job
    except (psutil.Error, OSError):  # it has ended, or is another user's
        return False


def _end(processes: list[psutil.Process]) -> None:
    for process in processes:
        _signal(process, "terminate")
    _, stubborn = psutil.wait_procs(processes, timeout=GRACE)
    for process in stubborn:
        _signal(process, "kill")
    psutil.wait_procs(stubborn, timeout=GRACE)


def _signal(process: psutil.Process, how: str) -> None:
    with contextlib.suppress(psutil.Error):
        getattr(process, how)()
