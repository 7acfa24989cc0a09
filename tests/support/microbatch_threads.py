"""Threads in which microbatches run end some time after ``smp.shutdown``."""

from __future__ import annotations

import threading
import time

from tests.support.patience import PATIENCE

__all__ = ["wait_until_microbatch_threads_end"]


def wait_until_microbatch_threads_end() -> None:
    """Raises AssertionError: a thread is left."""
    deadline = time.monotonic() + PATIENCE / 4
    while any(thread.name == "smp-microbatch" for thread in threading.enumerate()):
        assert time.monotonic() < deadline, threading.enumerate()
        time.sleep(0.01)
