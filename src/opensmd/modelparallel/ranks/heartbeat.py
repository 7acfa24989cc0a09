"""Letting one rank work for longer than a group's timeout while the others wait for it.

As long as the working rank is alive, a thread sends a sign of life from time to time, so no single wait of
the others is long. If it dies, they learn it as from any other collective.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Iterator

import torch
import torch.distributed as dist

from opensmd.collectives._torch_internals import timeout_of
from opensmd.modelparallel.ranks.sendable import control_device

__all__ = ["keep_waiting", "wait_for"]

logger = logging.getLogger("opensmd.modelparallel")

MOST_SECONDS = 5.0  # between two signs of life
REPORT_SECONDS = 60.0  # between two log lines of the waiting ranks
_AT_WORK, _DONE = 0, 1


@contextlib.contextmanager
def keep_waiting(group: dist.ProcessGroup) -> Iterator[None]:
    """Keep the other ranks of ``group`` waiting in :func:`wait_for` while the body runs on this one.

    Nothing else may use ``group`` in the body.
    """
    ended = threading.Event()
    rank, timeout = dist.get_rank(group), timeout_of(group)
    pause = MOST_SECONDS if timeout is None else min(MOST_SECONDS, timeout.total_seconds() / 4)

    def beat() -> None:
        with contextlib.suppress(RuntimeError):  # the main thread will meet the same failure
            while not ended.wait(pause):
                _signal(group, rank, _AT_WORK)

    thread = threading.Thread(target=beat, name="heartbeat", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
        _signal(group, rank, _DONE)


def wait_for(rank: int, group: dist.ProcessGroup, work: str) -> None:
    """Wait until the body of :func:`keep_waiting` ends on ``rank`` of ``group``, however long that takes.

    Args:
        work: what that rank does, for the log line once a minute.

    Raises:
        RuntimeError: that rank died, or gave no sign of life within the group's timeout.
    """
    began = reported = time.monotonic()
    while _signal(group, rank, _AT_WORK) != _DONE:
        now = time.monotonic()
        if now - reported >= REPORT_SECONDS:
            reported = now
            logger.warning("waiting for rank %d, which %s, for %.0f s", rank, work, now - began)


def _signal(group: dist.ProcessGroup, source: int, mine: int) -> int:
    """Receive the number that ``source`` sends."""
    number = torch.tensor([mine], dtype=torch.int64, device=control_device(group))
    dist.broadcast(number, group=group, group_src=source)
    return int(number.item())
