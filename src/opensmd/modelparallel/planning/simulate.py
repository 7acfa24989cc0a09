"""How long a step takes on a chain of stages: the engine's own schedule, played with predicted times.

Messages take no time here. A stage that has nothing else to do computes a late gradient of weights, as the
engine does.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from opensmd.modelparallel.planning.plan import StageLoad
from opensmd.modelparallel.planning.schedule import Progress, ReadyFirst

__all__ = ["Part", "parts_of_step", "seconds_of_step"]

# More microbatches than these repeat what the ones in the middle do.
MOST_MICROBATCHES = 64

_KINDS = {Progress.AT_BACKWARD: "F", Progress.DONE: "B", Progress.BACKWARD: "W"}

# What ends together on paper must not begin one after the other because of a sum's last bits.
SAME_TIME = 1 + 1e-9


class Part(NamedTuple):
    """Something that a stage does: ``kind`` is F, B or W (weight gradients); times are seconds."""

    stage: int
    kind: str
    microbatch: int
    start: float
    end: float


def parts_of_step(loads: Sequence[StageLoad], microbatches: int) -> list[Part]:
    """What the stages of a chain do, in the order of its beginning; see :func:`seconds_of_step`."""
    step = _Step(loads, microbatches)
    step.run()
    return step.parts


def seconds_of_step(loads: Sequence[StageLoad], microbatches: int) -> float:
    """The time from the first forward to the end of the last stage that works.

    Args:
        loads: of the stages, in the order of a chain; seconds are of one microbatch.
        microbatches: of the step.
    """
    played = min(microbatches, MOST_MICROBATCHES)
    longest = max(load.seconds for load in loads)
    return _Step(loads, played).run() + (microbatches - played) * longest


class _Stage:
    """What one stage has done and what has come to it."""

    def __init__(self, load: StageLoad, microbatches: int, last: bool) -> None:
        self.load = load
        self.last = last
        self.progress = [Progress.NEW] * microbatches
        self.has_input = [False] * microbatches
        self.has_gradient = [last] * microbatches
        self.late_from = microbatches - min(load.late, microbatches)
        self.waiting: deque[int] = deque()  # microbatches whose weight gradients are left
        self.busy = False
        self._policy = ReadyFirst("interleaved", load.in_flight)

    def begin(self) -> tuple[int, Progress, float] | None:
        """What the stage does next: the microbatch, what it will be then, and how long it takes."""
        if self.busy:
            return None
        chosen = self._policy.pick(self.progress, lambda microbatch: self.has_gradient[microbatch])
        if chosen is not None and self.progress[chosen] is Progress.AT_BACKWARD:
            late = self.load.late_seconds if chosen >= self.late_from else 0.0
            return chosen, Progress.DONE, self.load.backward_seconds - late
        if chosen is not None and self.has_input[chosen]:
            return chosen, Progress.AT_BACKWARD, self.load.forward_seconds
        if self.waiting:
            return self.waiting[0], Progress.BACKWARD, self.load.late_seconds
        return None

    def end(self, microbatch: int, progress: Progress) -> None:
        """It has done that."""
        self.busy = False
        if progress is Progress.BACKWARD:
            self.waiting.popleft()
            return
        self.progress[microbatch] = progress
        if progress is Progress.DONE and microbatch >= self.late_from:
            self.waiting.append(microbatch)


class _Step:
    """Stages side by side, and the ends of what they are doing, in order of time."""

    def __init__(self, loads: Sequence[StageLoad], microbatches: int) -> None:
        last = len(loads) - 1
        self._stages = [_Stage(load, microbatches, index == last) for index, load in enumerate(loads)]
        self._stages[0].has_input = [True] * microbatches
        self._ends: list[tuple[float, int, int, Progress]] = []
        self.parts: list[Part] = []

    def run(self) -> float:
        """Play the step; the time at its end."""
        now = 0.0
        self._begin(now)
        while self._ends:
            now = self._ends[0][0]
            while self._ends and self._ends[0][0] <= now * SAME_TIME:
                _, index, microbatch, progress = heapq.heappop(self._ends)
                self._stages[index].end(microbatch, progress)
                self._tell(index, microbatch, progress)
            self._begin(now)
        return now

    def _tell(self, index: int, microbatch: int, progress: Progress) -> None:
        """Pass on what the next stage or the one before needs."""
        if progress is Progress.AT_BACKWARD and index + 1 < len(self._stages):
            self._stages[index + 1].has_input[microbatch] = True
        elif progress is Progress.DONE and index:
            self._stages[index - 1].has_gradient[microbatch] = True

    def _begin(self, now: float) -> None:
        for index, stage in enumerate(self._stages):
            started = stage.begin()
            if started is not None:
                microbatch, progress, seconds = started
                stage.busy = True
                heapq.heappush(self._ends, (now + seconds, index, microbatch, progress))
                self.parts.append(Part(index, _KINDS[progress], microbatch, now, now + seconds))
