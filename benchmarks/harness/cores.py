"""Whether the ranks' cores are near each other and our own at this moment, and waiting until they are.

Under a virtual machine the host may move our cores to another cache, or another socket, and back, within
seconds. Two cores that share a cache exchange a flag in some 70 ns; far ones need several times that, and an
all-reduce of 1 MiB then takes 20 times as long, whoever runs it.

What is a core to us may be half of one to the host, and the other half somebody else's. While that half
computes, for some 2 to 30 ms at a time, everything that is bound by a core's execution units, like a call
through torch, takes up to twice as long; a chain of dependent operations does not, so neither clock rate nor
stolen time shows it.

So both are measured before and after every block of calls, blocks that met either are thrown away, and the
next one waits, for a bounded time, until the machine is calm.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from benchmarks.floor.shared import Floor
from benchmarks.harness.meeting import Meeting

__all__ = ["Cores"]

FLAGS = 500
BEST = Path("out/bench/best_cores.json")  # the shortest times ever seen on this machine, in ns
FAR = 2.0  # times the best flag exchange
SHARED = 1.15  # times the best loop of independent additions
LOOK = 2e-4  # seconds, about, that a look takes


class Cores:
    """The state of the cores of ranks 0 and 1, known to all ranks alike."""

    def __init__(self, meeting: Meeting, folder: Path, *, patience: float) -> None:
        """``patience``: seconds to wait for calm in one case; after that blocks count as they are."""
        self._meeting, self._patience = meeting, patience
        self._pair = min(2, meeting.size)
        here = meeting.rank < self._pair
        self._floor = Floor(folder / "pair", meeting.rank, self._pair) if here else None
        self._best: dict[str, int] = json.loads(BEST.read_text()) if BEST.exists() else {}
        self._left = patience
        self._alone = True
        self.thrown_away = 0

    @property
    def nearest_us(self) -> float | None:
        """Microseconds of the fastest flag exchange seen; None where nobody had the patience to look."""
        return self._best["flags"] / 1000 if "flags" in self._best else None

    def new_case(self) -> None:
        """Be patient again."""
        self._left = self._patience
        self._alone = True

    def need_not_be_alone(self) -> None:
        """From now on in this case only distance counts: its blocks last longer than others stay away."""
        self._alone = False

    def calm(self) -> bool:
        """Measure now; every rank gets the same answer."""
        self._meeting.wait()
        if self._floor is not None:
            stamps = np.empty(FLAGS + 1, dtype=np.int64)
            self._floor.flags(stamps)
            mine = self._meeting.mine(1)
            mine[0] = int(np.median(np.diff(stamps.reshape(-1)[::10]))) // 10
            mine[1] = self._floor.additions()
        self._meeting.wait(patiently=self._meeting.size > self._pair)
        flags, additions = self._meeting.everyone(1)[: self._pair].max(axis=0).tolist()
        self._meeting.wait()
        near = flags <= FAR * self._lowest("flags", flags)
        alone = additions <= SHARED * self._lowest("additions", additions)
        return near and (alone or not self._alone)

    def wait_for_calm(self) -> bool:
        """Wait while the machine is not calm and patience lasts; False once it is used up.

        Without sleeping: a core that has slept is slow at first.
        """
        while self._left > 0:
            if self.calm():
                return True
            self._left -= LOOK
        return False

    def throw_away(self, seconds: float) -> None:
        """A block that lasted about ``seconds`` does not count, which costs patience."""
        self.thrown_away += 1
        self._left -= seconds

    def _lowest(self, what: str, now: int) -> int:
        best = min(now, self._best.get(what, now))
        if best != self._best.get(what):
            self._best[what] = best
            if self._meeting.rank == 0:
                BEST.parent.mkdir(parents=True, exist_ok=True)
                BEST.write_text(json.dumps(self._best))
        return best
