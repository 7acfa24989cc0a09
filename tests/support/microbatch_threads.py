"""Threads in which microbatches run end some time after ``smp.shutdown``."""

from __future__ import annotations

import threading

from tests.support.patience import PATIENCE, wait_until

__all__ = ["wait_until_microbatch_threads_end"]


def wait_until_microbatch_threads_end() -> None:
    """Raises AssertionError: a thread is left."""
    # shorter than the caller of the ranks waits
    wait_until(_have_ended, timeout=PATIENCE / 4)


def _have_ended() -> bool:
    return all(thread.name != "smp-microbatch" for thread in threading.enumerate())
