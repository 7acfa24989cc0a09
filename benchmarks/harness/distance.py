"""How far apart the cores are at this moment, and waiting until they are near.

Under a virtual machine the host may move our cores to another cache, or another socket, and back, within
seconds. Two cores that share a cache exchange a flag in some 70 ns; far ones need several times that, and an
all-reduce of 1 MiB then takes 20 times as long, whoever runs it. So the distance is measured around every
round, rounds in the far state are thrown away, and the next round waits, for a bounded time, until the cores
are near.
"""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np

from benchmarks.floor.shared import Floor
from benchmarks.harness.meeting import Meeting

__all__ = ["Distance"]

FLAGS = 500
BEST = Path("out/bench/nearest_ns")  # the smallest distance ever seen on this machine


class Distance:
    """The time of a flag exchange between ranks 0 and 1, known to all ranks alike."""

    def __init__(self, meeting: Meeting, folder: Path, *, patience: float) -> None:
        """``patience``: seconds to wait for near cores in one case; after that rounds count as they are."""
        self._meeting, self._patience = meeting, patience
        pair = min(2, meeting.size)
        self._floor = Floor(folder / "pair", meeting.rank, pair) if meeting.rank < pair else None
        self._nearest = float(BEST.read_text()) if BEST.exists() else float("inf")
        self.rounds_far = 0
        self._left = patience

    @property
    def nearest_us(self) -> float:
        """Microseconds of the fastest flag exchange seen."""
        return self._nearest / 1000

    def new_case(self) -> None:
        """Be patient again."""
        self._left = self._patience

    def near(self) -> bool:
        """Measure now; every rank gets the same answer."""
        self._meeting.wait()
        if self._floor is not None:
            stamps = np.empty(FLAGS + 1, dtype=np.int64)
            self._floor.flags(stamps)
            self._meeting.mine(0)[0] = int(np.median(np.diff(stamps.reshape(-1)[::10]))) // 10
        self._meeting.wait(patiently=True)
        now = float(self._meeting.everyone(0)[0, 0])
        self._meeting.wait()
        if now < self._nearest:
            self._nearest = now
            self._remember()
        return now <= 2 * self._nearest

    def wait_until_near(self) -> bool:
        """Wait while the cores are far and patience lasts; False once it is used up."""
        while not self.near():
            if self._left <= 0:
                return False
            time.sleep(0.1)
            self._left -= 0.1
        return True

    def _remember(self) -> None:
        if self._meeting.rank == 0:
            BEST.parent.mkdir(parents=True, exist_ok=True)
            BEST.write_text(f"{self._nearest}")
