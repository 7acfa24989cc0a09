"""How fast a file is written beside training: at once on a core that is free, little by little on a busy one.

A low priority alone does not do. A thread that is given little of a busy core holds Python's lock all the
longer, and training waits for that: with the least priority there is, steps beside another busy process took
twice as long. So the thread has a moderate one, and rests where it notices that it must share the core.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

__all__ = ["Pace"]

SHARE = 0.005  # of a busy core
PIECE = 0.003  # seconds of work before it looks
BUSY = 1.5  # times the work is what it takes on a core that others want
LONGEST = 600.0  # seconds in which it may rest: then others have waited enough
LOOK = 0.25  # seconds of a rest between two looks whether another rank waits


class Pace:
    """Of one save; called by the thread that writes, between pieces of its work.

    Args:
        others_wait: whether another rank waits for the save, which needs this rank's part, too.

    Attributes:
        worked_at: when a piece of the work ended last, by ``time.perf_counter``.
    """

    def __init__(self, others_wait: Callable[[], bool] = lambda: False) -> None:
        self._others_wait = others_wait
        self._hurried = threading.Event()
        self.worked_at = time.perf_counter()
        self._end = self.worked_at + LONGEST
        self._began: float | None = None
        self._work = 0.0

    def hurry(self) -> None:
        """Rest no more: somebody waits."""
        self._hurried.set()

    def __call__(self) -> None:
        """Rest, if the core is busy and the thread has had its share."""
        self.worked_at = time.perf_counter()
        if self._began is None:  # only now it is the thread that writes, whose time of work counts
            self._begin()
            return
        now = self.worked_at
        took, worked = now - self._began, time.thread_time() - self._work
        if worked < PIECE:
            return
        if took > BUSY * worked and now < self._end:
            self._rest(min(worked / SHARE - took, self._end - now))
        self._begin()

    def _rest(self, seconds: float) -> None:
        until = time.perf_counter() + seconds
        while (left := until - time.perf_counter()) > 0 and not self._hurried.wait(min(left, LOOK)):
            if self._others_wait():
                self.hurry()

    def _begin(self) -> None:
        self._began, self._work = time.perf_counter(), time.thread_time()
