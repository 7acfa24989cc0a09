"""A thread's time without its waits for a core, because a busy machine does not make a model slow."""

from __future__ import annotations

import contextlib
import os
import time

__all__ = ["Stopwatch"]

_ACCOUNT = "/proc/thread-self/schedstat"  # Linux: nanoseconds running, nanoseconds waiting for a core, turns


class Stopwatch:
    """Seconds of the creating thread; including waits if the kernel does not separate them."""

    def __init__(self) -> None:
        self._file: int | None = None
        with contextlib.suppress(OSError):
            self._file = os.open(_ACCOUNT, os.O_RDONLY | os.O_CLOEXEC)

    def __del__(self) -> None:
        if self._file is not None:
            os.close(self._file)

    def now(self) -> float:
        """Return seconds since an arbitrary moment."""
        if self._file is None:
            return time.perf_counter()
        waited = _waited(self._file)
        while True:
            moment = time.perf_counter()
            # A wait between the two readings is in only one of them: time would jump ahead, and then back.
            before, waited = waited, _waited(self._file)
            if waited == before:
                return moment - waited * 1e-9

    def seconds(self, since: float, until: float) -> float:
        """Return the seconds from one reading to another."""
        return until - since


def _waited(file: int) -> int:
    return int(os.pread(file, 64, 0).split()[1])
