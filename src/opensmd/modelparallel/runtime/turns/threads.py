"""Threads that persist between steps, and with them their thread pools in the math libraries."""

from __future__ import annotations

import threading
from collections.abc import Callable

__all__ = ["Threads"]


class Threads:
    """Runs jobs in idle threads, or in new ones."""

    def __init__(self) -> None:
        self._idle: list[_Thread] = []
        self._closed = False
        self._lock = threading.Lock()

    def start(self, job: Callable[[], None]) -> None:
        """Run ``job``, which must not raise, in another thread."""
        with self._lock:
            thread = self._idle.pop() if self._idle else None
        (thread or _Thread(self._goes_on)).run(job)

    def close(self) -> None:
        """End idle threads now, and the others after their jobs."""
        with self._lock:
            idle, self._idle, self._closed = self._idle, [], True
        for thread in idle:
            thread.run(None)

    def _goes_on(self, thread: _Thread) -> bool:
        """Take back a thread after its job; return whether it may get another one."""
        with self._lock:
            if not self._closed:
                self._idle.append(thread)
            return not self._closed


class _Thread:
    def __init__(self, goes_on: Callable[[_Thread], bool]) -> None:
        self._wake = threading.Lock()
        self._wake.acquire()
        self._job: Callable[[], None] | None = None
        self._goes_on = goes_on
        # A daemon, because it may be asleep when the process ends.
        threading.Thread(target=self._live, daemon=True, name="smp-microbatch").start()

    def run(self, job: Callable[[], None] | None) -> None:
        """Run ``job``, or end."""
        self._job = job
        self._wake.release()

    def _live(self) -> None:
        while True:
            self._wake.acquire()
            if self._job is None:
                return
            self._job()
            # Before it counts as idle, because it may then get another job.
            self._job = None
            if not self._goes_on(self):
                return
