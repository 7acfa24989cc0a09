"""How fast a background save writes: at once on a free core, little by little on a busy one.

A low priority alone is not enough. A thread that gets little of a busy core holds the GIL all the longer, and
training waits for it: at the lowest priority, steps next to another busy process took twice as long. So the
thread has a moderate priority, and rests when it notices that it must share the core.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

__all__ = ["Pace"]

SHARE = 0.005  # of a busy core
PIECE = 0.003  # seconds of work between looks
BUSY = 1.5  # a core is busy if a piece takes this many times its CPU time
LONGEST = 600.0  # seconds during which it may rest; then others have waited long enough
LOOK = 0.25  # seconds of rest between two looks whether another rank is waiting


class Pace:
    """The pace of one save; called by the writing thread between pieces of its work.

    Args:
        others_wait: whether another rank is waiting for the save, which also needs this rank's part.

    Attributes:
        worked_at: when the last piece of work ended, by ``time.perf_counter``.
    """

    def __init__(self, others_wait: Callable[[], bool] = lambda: False) -> None:
        self._others_wait = others_wait
        self._hurried = threading.Event()
        self.worked_at = time.perf_counter()
        self._end = self.worked_at + LONGEST
        self._began: float | None = None
        self._work = 0.0

    def hurry(self) -> None:
        """Stop resting, because somebody is waiting."""
        self._hurried.set()

    def __call__(self) -> None:
        """Rest if the core is busy and the thread has had its share."""
        self.worked_at = time.perf_counter()
        if self._began is None:  # first call in the writing thread, whose CPU time counts
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
