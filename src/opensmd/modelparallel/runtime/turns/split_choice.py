"""Which backwards of a step to split, chosen by the first steps' times.

Gradients are added in the order of the microbatches either way, so the choice does not change results.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from opensmd.modelparallel.planning.split_count import BackwardTimes, split_count
from opensmd.modelparallel.runtime.turns.rank_schedule import RankSchedule
from opensmd.modelparallel.runtime.turns.record import Record

__all__ = ["SplitChoice"]

FIRST = 1  # measuring starts after this many steps, because the first one still learns
MEASURED = 6  # the number of measured steps
AGAIN = 1000  # measure again after so many steps, because data sizes may change


@dataclass(slots=True)
class _Steps:
    """Steps with the same number of microbatches: how many they split, and nanoseconds of backwards."""

    chosen: int
    few: int = 0
    most: int = 0
    measured: bool = False
    ended: int = 0
    whole: list[int] = field(default_factory=list)
    first: list[int] = field(default_factory=list)
    weights: list[int] = field(default_factory=list)


class SplitChoice:
    """Decides how many of a step's last backwards to split.

    Args:
        schedule: this rank's. Only one that leaves the choice to measurement is measured.
    """

    def __init__(self, schedule: RankSchedule) -> None:
        self._schedule = schedule
        self._steps: dict[int, _Steps] = {}

    def splits_from(self, microbatches: int) -> int:
        """Return the microbatch from which on weight gradients are left for later."""
        if microbatches not in self._steps:
            self._steps[microbatches] = self._first_steps(microbatches)
        return microbatches - self._steps[microbatches].chosen

    def _first_steps(self, microbatches: int) -> _Steps:
        most = self._schedule.most_split(microbatches)
        if not most or not self._schedule.measures_splits:
            return _Steps(most)
        # At least one is not split, for comparison.
        few = min(self._schedule.few_split, most, microbatches - 1)
        return _Steps(few, few, most, measured=True)

    def step_has_ended(self, microbatches: int, record: Record) -> None:
        """Learn from a step's times."""
        steps = self._steps.get(microbatches)
        if steps is None or not steps.measured:
            return
        steps.ended += 1
        if steps.ended == AGAIN:
            self._steps.pop(microbatches)
        elif FIRST < steps.ended <= FIRST + MEASURED:
            self._measure(steps, microbatches, record)
            if steps.ended == FIRST + MEASURED:
                steps.chosen = min(self._chosen(steps, microbatches), steps.most)

    def _measure(self, steps: _Steps, microbatches: int, record: Record) -> None:
        backwards, weights = record.spent("backward"), record.spent("weights")
        for microbatch, spent in backwards.items():
            if microbatch < microbatches - steps.few:
                steps.whole.append(spent)
            elif microbatch in weights:
                steps.first.append(spent)
        steps.weights += weights.values()

    def _chosen(self, steps: _Steps, microbatches: int) -> int:
        if not (steps.whole and steps.first and steps.weights):
            return 0  # nothing in these backwards can wait
        times = BackwardTimes(_usual(steps.whole), _usual(steps.first), _usual(steps.weights))
        return split_count(
            times,
            stage=self._schedule.stage,
            partitions=self._schedule.partitions,
            microbatches=microbatches,
            few=steps.few,
            in_a_v=self._schedule.in_a_v,
        )


def _usual(spent: list[int]) -> int:
    """Return a backward's time on an otherwise idle machine: the longest of the quickest quarter."""
    return sorted(spent)[len(spent) // 4]
