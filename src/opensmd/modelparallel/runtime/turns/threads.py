"""Threads that stay from step to step, so that the math libraries' thread pools behind them do too."""

from __future__ import annotations

import threading
from collections.abc import Callable

__all__ = ["Threads"]


class Threads:
    """Runs jobs in threads that have nothing to do, or in new ones."""

    def __init__(self) -> None:
        self._idle: list[_Thread] = []
        self._lock = threading.Lock()

    def start(self, job: Callable[[], None]) -> None:
        """Run ``job``, which must not raise, in another thread."""
        with self._lock:
            thread = self._idle.pop() if self._idle else None
        (thread or _Thread(self._done)).run(job)

    def _done(self, thread: _Thread) -> None:
        with self._lock:
            self._idle.append(thread)


class _Thread:
    def __init__(self, done: Callable[[_Thread], None]) -> None:
        self._wake = threading.Lock()
        self._wake.acquire()
        self._job: Callable[[], None] | None = None
        self._done = done
        # A daemon, as it sleeps when the process ends.
        threading.Thread(target=self._live, daemon=True, name="smp-microbatch").start()

    def run(self, job: Callable[[], None]) -> None:
        self._job = job
        self._wake.release()

    def _live(self) -> None:
        while True:
            self._wake.acquire()
            assert self._job is not None
            self._job()
            # Before it counts as idle: from then on somebody may give it another job.
            self._job = None
            self._done(self)
