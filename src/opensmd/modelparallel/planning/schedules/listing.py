"""List scheduling: a free rank does what a rule prefers of all that it can do, within its memory.

A rule is fast but greedy. A search (:mod:`.searched`) starts from several of them with different preferences.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from opensmd.modelparallel.planning.schedules.tables import Action, ChunkTimes, Kind

__all__ = ["RULES", "Rule", "listed"]

Rows = tuple[tuple[Action, ...], ...]


class Rule(NamedTuple):
    """What a rank prefers.

    Attributes:
        first: forwards, backwards, or alternating.
        weights: when weight gradients come: at once, when nothing else can run, or only then and if they end
            before what the rank waits for can arrive.
        ahead: how many microbatches a rank takes before a backward, beyond the number of ranks after it.
    """

    first: Literal["F", "B", "other"]
    weights: Literal["at once", "idle", "fitting"]
    ahead: int


_FIRST: tuple[Literal["F", "B", "other"], ...] = ("B", "other", "F")
_WEIGHTS: tuple[Literal["at once", "idle", "fitting"], ...] = ("idle", "fitting", "at once")
RULES = tuple(Rule(*choices) for choices in itertools.product(_FIRST, _WEIGHTS, (1, 2, 4, 1000)))


@dataclass
class _ListedRank:
    """The progress of a rank; ``next`` counts by kind and chunk."""

    stages: Sequence[int]
    free: float = 0.0
    kept: int = 0
    row: list[Action] = field(default_factory=list)
    left: list[Action] = field(default_factory=list)  # weight gradients
    next: dict[tuple[Kind, int], int] = field(default_factory=dict)


def listed(
    stages: Sequence[Sequence[int]],
    times: Sequence[ChunkTimes],
    microbatches: int,
    most_kept: Sequence[int],
    rule: Rule,
) -> Rows | None:
    """Schedule by a rule; return None if that fills memory with what cannot end.

    Args:
        stages: those of each rank.
        times: those of each stage.
        microbatches: those of the step.
        most_kept: for how many, counted once per chunk, each rank may keep activations.
        rule: decides what comes first.
    """
    return _Listing(stages, times, microbatches, most_kept, rule).run()


class _Listing:
    def __init__(
        self,
        stages: Sequence[Sequence[int]],
        times: Sequence[ChunkTimes],
        microbatches: int,
        most_kept: Sequence[int],
        rule: Rule,
    ) -> None:
        self._ranks = [_ListedRank(own) for own in stages]
        self._times = times
        self._count = microbatches
        self._most_kept = most_kept
        self._rule = rule
        self._last = len(times) - 1
        self._ended: dict[tuple[Kind, int, int], float] = {}  # kind, microbatch, stage

    def run(self) -> Rows | None:
        moments = [0.0]
        while moments:
            now = heapq.heappop(moments)
            for number, rank in enumerate(self._ranks):
                while rank.free <= now:
                    action = self._chosen(number, rank, now)
                    if action is None:
                        break
                    self._do(rank, action, now)
                    heapq.heappush(moments, rank.free)
        wanted = sum(3 * self._count * len(rank.stages) for rank in self._ranks)
        done = sum(len(rank.row) for rank in self._ranks)
        return tuple(tuple(rank.row) for rank in self._ranks) if done == wanted else None

    def _do(self, rank: _ListedRank, action: Action, now: float) -> None:
        stage = rank.stages[action.chunk]
        rank.free = now + self._times[stage].of(action.kind)
        rank.row.append(action)
        self._ended[action.kind, action.microbatch, stage] = rank.free
        if action.kind == "W":
            rank.left.remove(action)
            rank.kept -= 1
            return
        rank.next[action.kind, action.chunk] = action.microbatch + 1
        if action.kind == "F":
            rank.kept += 1
            return
        rank.left.append(action._replace(kind="W"))
        if not self._times[stage].weights:  # nothing is left over
            self._do(rank, rank.left[-1], rank.free)

    def _chosen(self, number: int, rank: _ListedRank, now: float) -> Action | None:
        ready = [action for action in self._possible(number, rank) if self._begins(rank, action) <= now]
        if ready and not (rank.left and self._rule.weights == "at once"):
            return min(ready, key=lambda action: self._place(rank, action))
        if not rank.left:
            return min(ready, key=lambda action: self._place(rank, action)) if ready else None
        weights = rank.left[0]
        if self._rule.weights == "fitting" and self._is_awaited_before_end_of(weights, number, rank, now):
            return None
        return weights

    def _is_awaited_before_end_of(self, weights: Action, number: int, rank: _ListedRank, now: float) -> bool:
        begins = [self._begins(rank, action) for action in self._possible(number, rank)]
        half = self._times[rank.stages[weights.chunk]].weights / 2
        return any(now < begin < now + half for begin in begins)

    def _possible(self, number: int, rank: _ListedRank) -> Iterator[Action]:
        """Return the next action of each kind and chunk, if there is memory for it."""
        chunks = len(rank.stages)
        for chunk in range(chunks):
            backward = rank.next.get(("B", chunk), 0)
            forward = rank.next.get(("F", chunk), 0)
            if backward < forward:
                yield Action("B", backward, chunk)
            if forward == self._count:
                continue
            # what has started must find memory in later chunks
            room = self._most_kept[number] - rank.kept - (chunks - 1 - chunk)
            ahead = (len(self._ranks) - 1 - number) * chunks + self._rule.ahead
            if room > 0 and (chunk or forward - backward < ahead):
                yield Action("F", forward, chunk)

    def _begins(self, rank: _ListedRank, action: Action) -> float:
        """Return when what it needs arrives; infinity if not known yet."""
        stage = rank.stages[action.chunk]
        needs: list[tuple[Kind, int, int]] = []
        if action.kind == "F" and stage:
            needs.append(("F", action.microbatch, stage - 1))
        if action.kind == "B":
            needs.append(("F", action.microbatch, stage))
            if stage < self._last:
                needs.append(("B", action.microbatch, stage + 1))
        return max((self._ended.get(need, float("inf")) for need in needs), default=0.0)

    def _place(self, rank: _ListedRank, action: Action) -> tuple[bool, int, int]:
        first = self._rule.first
        if first == "other":
            before = [done.kind for done in rank.row if done.kind != "W"]
            first = "B" if before and before[-1] == "F" else "F"
        return action.kind != first, action.microbatch, -action.chunk
