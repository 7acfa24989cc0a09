"""No process of a job outlives it: the launcher adopts what its ranks leave behind, and ends it.

A rank's own children (DataLoader workers, subprocesses) are handed to process 1 when the rank is killed, out
of reach. A launcher that is the kernel's "child subreaper" gets them instead, and finds them as its own
descendants.
"""

from __future__ import annotations

import ctypes
import sys

import psutil

__all__ = ["adopt", "end_all"]

_PR_SET_CHILD_SUBREAPER = 36
GRACE = 2.0  # seconds between SIGTERM and SIGKILL


def adopt() -> None:
    """From now on, orphans among this process's descendants become its own children."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1)


def end_all() -> None:
    """End every descendant of this process, first politely."""
    left = psutil.Process().children(recursive=True)
    for process in left:
        _signal(process, "terminate")
    _, stubborn = psutil.wait_procs(left, timeout=GRACE)
    for process in stubborn:
        _signal(process, "kill")
    psutil.wait_procs(stubborn, timeout=GRACE)


def _signal(process: psutil.Process, how: str) -> None:
    try:
        getattr(process, how)()
    except psutil.NoSuchProcess:
        return
