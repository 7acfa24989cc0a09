"""Where the ranks of a benchmark meet between measurements, and where they leave their time stamps.

It is a small file in shared memory, written with numpy, so that the meeting itself uses none of the
libraries that are measured and disturbs none of them::

    arrived[rank]            a counter that only its rank writes
    stamps[rank, 0 .. n]     CLOCK_MONOTONIC in ns: before the first call, and after each call
"""

from __future__ import annotations

import mmap
import os
import time
from pathlib import Path

import numpy as np
import numpy.typing as npt

__all__ = ["MAX_CALLS", "Meeting"]

MAX_CALLS = 1024
LINE = 16  # int64 a rank's counter is apart from the next: two cache lines
Stamps = npt.NDArray[np.int64]


class Meeting:
    """A barrier and a board of time stamps for the ranks of one host."""

    def __init__(self, path: Path, rank: int, size: int) -> None:
        """``path`` is a file of zeros made by :meth:`create`, the same for every rank."""
        self.rank, self.size = rank, size
        with path.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), 0)
        words = np.frombuffer(self._map, dtype=np.int64)
        self._arrived = words[: size * LINE : LINE]
        self._board = words[size * LINE :].reshape(size, MAX_CALLS + 1)
        self._rounds = 0

    @staticmethod
    def create(path: Path, size: int) -> None:
        """Make the file that the ranks will share."""
        path.write_bytes(bytes(8 * (size * LINE + size * (MAX_CALLS + 1))))

    def wait(self, *, patiently: bool = False) -> None:
        """Return once every rank has called this as often as this one; ``patiently``: sleep between looks."""
        self._rounds += 1
        self._arrived[self.rank] = self._rounds
        deadline = time.monotonic() + 120
        while int(self._arrived.min()) < self._rounds:
            if patiently:
                time.sleep(2e-4)
            else:
                os.sched_yield()
            if time.monotonic() > deadline:
                raise RuntimeError(f"rank {self.rank} waited 120 s for the others: {self._arrived.tolist()}")

    def mine(self, calls: int) -> Stamps:
        """This rank's row of the board, for ``calls`` calls."""
        return self._board[self.rank, : calls + 1]

    def everyone(self, calls: int) -> Stamps:
        """All ranks' stamps: ``[ranks, calls + 1]``."""
        return self._board[:, : calls + 1]
