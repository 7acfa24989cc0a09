"""How long a step takes: a simulation of the engine's own policies with predicted times.

Messages take no time unless given. ``tests/unit/modelparallel/runtime/turns`` compares this simulation with
the engine's turns.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Literal, NamedTuple

from opensmd.modelparallel.planning.plan import StageLoad
from opensmd.modelparallel.planning.policies.limits import MOST_AHEAD, forwards_ahead
from opensmd.modelparallel.planning.policies.patience import Patience
from opensmd.modelparallel.planning.policies.policy import Policy, Progress, Standing
from opensmd.modelparallel.planning.policies.table_order import TableOrder
from opensmd.modelparallel.planning.schedules.tables import Action, ChunkTimes, Kind, fused
from opensmd.modelparallel.planning.schedules.v import zero_bubble_v
from opensmd.modelparallel.planning.schedules.zero_bubble import zero_bubble

__all__ = ["MOST_MICROBATCHES", "Part", "RankPlayed", "parts_of_step", "play_policies", "seconds_of_step"]

# Further microbatches only repeat what those in the middle do.
MOST_MICROBATCHES = 64
# Events that coincide on paper must not be ordered by rounding errors.
SAME_TIME = 1 + 1e-9

Delays = Mapping[tuple[int, Action], float]  # (rank, action) -> how much longer it takes


class Part(NamedTuple):
    """An action of a rank: ``kind`` is F, B or W (weight gradients); times are in seconds."""

    stage: int
    kind: Kind
    microbatch: int
    start: float
    end: float
    chunk: int = 0


@dataclass(frozen=True)
class RankPlayed:
    """How one rank works.

    Attributes:
        policy: decides what it does next.
        stages: the model's stages, by chunk.
        times: those of these stages.
        splits_from: microbatches from this one on compute weight gradients separately.
        patience: decides how long it waits for what its table has next.
    """

    policy: Policy
    stages: Sequence[int]
    times: Sequence[ChunkTimes]
    splits_from: int = 0
    patience: Patience = field(default_factory=Patience)


def parts_of_step(loads: Sequence[StageLoad], microbatches: int, *, in_a_v: bool = False) -> list[Part]:
    """Return the stages' actions, ordered by start; see :func:`seconds_of_step`."""
    of = _of_a_v if in_a_v else _of_chain
    return play_policies(of(loads, microbatches), microbatches)


def seconds_of_step(loads: Sequence[StageLoad], microbatches: int, *, in_a_v: bool) -> float:
    """Return the time from the first forward to the end of the last action.

    Args:
        loads: of the stages, in the order of a chain; seconds are per microbatch.
        microbatches: of the step.
        in_a_v: whether each stage has two pieces of the model, each with half of its load.
    """
    played = min(microbatches, MOST_MICROBATCHES)
    longest = max(load.seconds for load in loads)
    seconds = max(part.end for part in parts_of_step(loads, played, in_a_v=in_a_v))
    return seconds + (microbatches - played) * longest


def play_policies(
    ranks: Sequence[RankPlayed], microbatches: int, *, sending: float = 0.0, delays: Delays | None = None
) -> list[Part]:
    """Return the actions of ranks that follow their policies, ordered by start.

    Args:
        sending: how long a tensor is in transit.
        delays: by how much some actions are delayed.
    """
    return _SimulatedStep(ranks, microbatches, sending, delays or {}).run()


def _of_chain(loads: Sequence[StageLoad], microbatches: int) -> list[RankPlayed]:
    first, stages = loads[0].in_flight, len(loads)
    # If all microbatches are in flight, that does not tell how many more might be.
    active = stages + MOST_AHEAD if first == microbatches else first
    table = zero_bubble(stages, microbatches, forwards_ahead(stages, active))
    ranks = []
    for stage, (load, row) in enumerate(zip(loads, table.rows, strict=True)):
        if first >= min(stages, microbatches):
            policy = TableOrder(row, most_active=math.inf, early=False, weights_last=False)
        else:
            kept = load.late or microbatches
            policy = TableOrder(row, most_active=microbatches, most_kept=kept, window=load.in_flight)
        # Two ranks gain nothing from splitting more than the last backwards.
        splits_from = microbatches - load.late if stages == 2 else 0
        ranks.append(RankPlayed(policy, (stage,), (load.times,), splits_from))
    return ranks


def _of_a_v(loads: Sequence[StageLoad], microbatches: int) -> list[RankPlayed]:
    table = fused(zero_bubble_v(len(loads), microbatches))
    passed = sorted(itertools.chain(*table.stages))
    ranks = []
    for load, row, stages in zip(loads, table.rows, table.stages, strict=True):
        policy = TableOrder(row, most_active=math.inf, early=False, weights_last=False)
        own = [passed.index(stage) for stage in stages]
        ranks.append(RankPlayed(policy, own, [load.times.shared_out(len(stages))] * len(stages)))
    return ranks


class _Rank:
    """What one rank has done and received."""

    def __init__(self, rank: RankPlayed, microbatches: int) -> None:
        self.busy = False
        self.waits_until = -math.inf
        self._rank = rank
        self._awaited: Action | None = None
        self._given_up: Action | None = None
        self._standing = Standing([Progress.NEW] * microbatches, [0] * microbatches, [])
        self._come: set[tuple[Literal["F", "B"], int, int]] = set()  # kind, microbatch, chunk

    def take(self, kind: Literal["F", "B"], microbatch: int, stage: int) -> None:
        """Receive an input or a gradient."""
        self._come.add((kind, microbatch, self._rank.stages.index(stage)))

    def begin(self, now: float) -> Action | None:
        """Start the rank's next action and return it."""
        progress, chunks, weights = self._standing
        while not self.busy:
            choice = self._rank.policy.pick(self._standing, self._can_go_on)
            if choice is None or self._waits(choice.instead_of, now):
                return None
            microbatch = choice.microbatch
            if choice.weights is not None:
                weights.remove((microbatch, choice.weights))  # type: ignore[attr-defined]
                return Action("W", microbatch, choice.weights)
            state, chunk = progress[microbatch], chunks[microbatch]
            if state is Progress.AT_BACKWARD:
                return Action("B", microbatch, chunk)
            if ("F", microbatch, chunk) in self._come:
                return Action("F", microbatch, chunk)
            progress[microbatch] = Progress.FORWARD  # type: ignore[index]
        return None

    def _waits(self, late: Action | None, now: float) -> bool:
        """Whether to wait for something late; see ``Turns``."""
        patience = self._rank.patience
        if self._awaited is not None:
            if late == self._awaited and now * SAME_TIME < self.waits_until:
                return True
            patience.has_waited(came=late != self._awaited)
            self._awaited = None
        if late is None or late == self._given_up or not patience.seconds:
            return False
        self._awaited = self._given_up = late
        self.waits_until = now + patience.seconds
        return True

    def _can_go_on(self, microbatch: int) -> bool:
        at_backward = self._standing.progress[microbatch] is Progress.AT_BACKWARD
        kind: Literal["F", "B"] = "B" if at_backward else "F"
        return (kind, microbatch, self._standing.chunks[microbatch]) in self._come

    def seconds(self, action: Action) -> float:
        times = self._rank.times[action.chunk]
        whole = times.backward if self._splits(action) else times.backward + times.weights
        return {"F": times.forward, "B": whole, "W": times.weights}[action.kind]

    def _splits(self, action: Action) -> bool:
        """Whether a backward leaves weight gradients for later."""
        return bool(self._rank.times[action.chunk].weights) and action.microbatch >= self._rank.splits_from

    def end(self, action: Action) -> None:
        """End the rank's current action."""
        self.busy = False
        kind, microbatch, chunk = action
        state, last = Progress.AT_BACKWARD, len(self._rank.stages) - 1
        if kind == "W":
            return
        if kind == "F" and chunk < last:
            state, chunk = Progress.AT_FORWARD, chunk + 1
        elif kind == "B":
            if self._splits(action):
                self._standing.weights.append((microbatch, chunk))  # type: ignore[attr-defined]
            state, chunk = (Progress.AT_BACKWARD, chunk - 1) if chunk else (Progress.DONE, 0)
        self._standing.progress[microbatch] = state  # type: ignore[index]
        self._standing.chunks[microbatch] = chunk  # type: ignore[index]


def _look_again() -> None:
    """Ask the ranks again when their patience may be over, as after every event."""


class _SimulatedStep:
    """All ranks, and the next events on them, ordered by time."""

    def __init__(
        self, ranks: Sequence[RankPlayed], microbatches: int, sending: float, delays: Delays
    ) -> None:
        self._ranks = [_Rank(rank, microbatches) for rank in ranks]
        self._stages = [rank.stages for rank in ranks]
        self._home = {stage: rank for rank, own in enumerate(self._stages) for stage in own}
        self._last = max(self._home)
        self._sending = sending
        self._delays = delays
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._parts: list[Part] = []
        self._count = 0
        for microbatch in range(microbatches):
            self._ranks[self._home[0]].take("F", microbatch, 0)

    def run(self) -> list[Part]:
        """Simulate the step."""
        now = 0.0
        self._begin(now)
        while self._events:
            now = self._events[0][0]
            while self._events and self._events[0][0] <= now * SAME_TIME:
                heapq.heappop(self._events)[2]()
            self._begin(now)
        return self._parts

    def _at(self, time: float, event: Callable[[], None]) -> None:
        self._count += 1
        heapq.heappush(self._events, (time, self._count, event))

    def _begin(self, now: float) -> None:
        for index, rank in enumerate(self._ranks):
            action = rank.begin(now)
            if action is None:
                if rank.waits_until > now * SAME_TIME:
                    self._at(rank.waits_until, _look_again)
                continue
            rank.busy = True
            end = now + rank.seconds(action) + self._delays.get((index, action), 0.0)
            self._parts.append(Part(index, action.kind, action.microbatch, now, end, action.chunk))
            self._at(end, partial(self._end, index, action, end))

    def _end(self, index: int, action: Action, now: float) -> None:
        """End an action, and deliver its results to the ranks that need them."""
        self._ranks[index].end(action)
        stage = self._stages[index][action.chunk]
        kind: Literal["F", "B"] = "F" if action.kind == "F" and stage < self._last else "B"
        target = stage if kind != action.kind else stage + (1 if kind == "F" else -1)
        if action.kind == "W" or target < 0:
            return
        receiver = self._home[target]
        take = partial(self._ranks[receiver].take, kind, action.microbatch, target)
        if receiver == index:
            take()
        else:
            self._at(now + self._sending, take)
