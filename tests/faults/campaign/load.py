"""Busy loops beside a campaign, because a quiet machine hides what is late."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["busy_loops"]


@contextmanager
def busy_loops(count: int) -> Iterator[None]:
    """Keep ``count`` processes busy."""
    pids = []
    for _ in range(count):
        pid = os.fork()
        if pid == 0:
            parent = os.getppid()
            while os.getppid() == parent:
                sum(range(100_000))
            os._exit(0)
        pids.append(pid)
    try:
        yield
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
