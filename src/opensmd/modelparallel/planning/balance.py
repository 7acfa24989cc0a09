"""Cutting a sequence of costs into stages: the dynamic programme behind the partitioner, and nothing else.

Two passes. The first finds the smallest possible worst stage. The second finds, among the splits whose worst
stage is hardly above that, the one whose cuts are cheapest and whose other stages are even: this makes the
partitioner cut at the border of a large module and descend only where that would unbalance the stages.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

__all__ = ["Sequence1D", "Split", "split_evenly"]

Floats = npt.NDArray[np.float64]

# By how much a split's worst stage may be above the best one, if its cuts are cheaper: less than what the
# times of units are known to, so that it costs nothing that would be sure.
TOLERANCE = 0.005
# how much a cut's cost weighs against unevenness among splits that are all good enough
CUT_WEIGHT = 20.0
# one step of the fold over stages: (best so far, this stage's load, its cut) by start -> value by start
Combine = Callable[[Floats, Floats, Floats], Floats]


@dataclass(frozen=True, kw_only=True)
class Sequence1D:
    """Items in order, with shares of the objective (any unit; the solver only compares sums).

    ``even`` is an item's share on any stage; ``staged`` is multiplied by ``weights[stage]`` (activations:
    early stages hold more microbatches). ``cuts[s][k]`` is charged to both neighbours of a cut before item
    ``k`` that divides stage ``s`` from the next one (``cuts[s][0]`` is ignored). ``fixed[k]`` is the stage an
    item must be on, or -1. ``preload`` is what a stage carries whatever the split.
    """

    even: Sequence[float]
    staged: Sequence[float]
    weights: Sequence[float]
    cuts: Sequence[Sequence[float]]
    fixed: Sequence[int]
    preload: Sequence[float]


@dataclass(frozen=True, kw_only=True)
class Split:
    """``bounds[s]`` to ``bounds[s + 1]`` are stage ``s``'s items; ``worst`` is the largest stage's share."""

    bounds: tuple[int, ...]
    worst: float
    cut_cost: float


def split_evenly(items: Sequence1D, *, tolerance: float = TOLERANCE) -> Split:
    """The best contiguous split into ``len(items.weights)`` stages. None is empty if that can be.

    Raises:
        ValueError: the fixed stages of the items decrease along the sequence: no contiguous split exists.
    """
    problem = _Problem(items, allow_empty=len(items.even) < len(items.weights))
    worst, _ = problem.solve(lambda best, load, cut: np.maximum(best, load))
    if not np.isfinite(worst):  # fixed places may leave nothing for a stage between them
        problem = _Problem(items, allow_empty=True)
        worst, _ = problem.solve(lambda best, load, cut: np.maximum(best, load))
    if not np.isfinite(worst):
        raise ValueError(
            "the fixed stages decrease in the order of execution; no contiguous split has them all"
        )
    limit = worst * (1 + tolerance) + 1e-15
    stages = len(items.weights)
    _, bounds = problem.solve(
        lambda best, load, cut: np.where(
            load <= limit, best + stages * load * load + CUT_WEIGHT * cut, np.inf
        )
    )
    loads = [float(problem.loads(s, bounds[s + 1])[bounds[s]]) for s in range(stages)]
    ends = {
        bound: stage for stage, bound in enumerate(bounds[1:-1])
    }  # where stages are empty, the last one's
    cuts = sum(float(problem.after(stage)[bound]) for bound, stage in ends.items())
    return Split(bounds=tuple(bounds), worst=max(loads), cut_cost=cuts)


class _Problem:
    """Prefix sums of the items, and the recursion over stages."""

    def __init__(self, items: Sequence1D, *, allow_empty: bool) -> None:
        self.count = len(items.even)
        self.stages = len(items.weights)
        self.even = _prefix(items.even)
        self.staged = _prefix(items.staged)
        self.weights = items.weights
        self.empty = 0.0 if allow_empty else np.inf
        self.preload = items.preload
        self._cuts = np.zeros((self.stages + 1, self.count + 1))  # before the first stage, and after each
        for stage, cuts in enumerate(items.cuts):
            self._cuts[stage + 1, 1 : self.count] = np.asarray(cuts, dtype=np.float64)[1:]
        fixed = np.asarray(items.fixed, dtype=np.int64)
        # how many items up to k must not be on stage s
        self.barred = [_prefix((fixed >= 0) & (fixed != stage)) for stage in range(self.stages)]

    def after(self, stage: int) -> Floats:
        """What a cut after ``stage`` costs, by the item before which it is."""
        cuts: Floats = self._cuts[stage + 1]
        return cuts

    def loads(self, stage: int, end: int) -> Floats:
        """The share of ``stage`` if it holds the items ``start`` to ``end``, for every ``start <= end``."""
        starts = slice(0, end + 1)
        load = self.even[end] - self.even[starts]
        load = load + self.weights[stage] * (self.staged[end] - self.staged[starts])
        load = load + self.after(stage - 1)[starts] + self.after(stage)[end]
        load[end] = self.empty  # an empty stage sends and receives nothing of its own
        barred = self.barred[stage]
        load[barred[end] - barred[starts] > 0] = np.inf
        return np.asarray(load + self.preload[stage], dtype=np.float64)

    def solve(self, combine: Combine) -> tuple[float, list[int]]:
        """Minimise ``combine`` folded over the stages; return the value and the bounds."""
        best = np.full(self.count + 1, np.inf)
        best[0] = 0.0
        choices: list[npt.NDArray[np.int64]] = []
        for stage in range(self.stages):
            following = np.full(self.count + 1, np.inf)
            choice = np.zeros(self.count + 1, dtype=np.int64)
            ends = range(self.count + 1) if stage < self.stages - 1 else (self.count,)
            for end in ends:
                value = combine(best[: end + 1], self.loads(stage, end), self.after(stage - 1)[: end + 1])
                choice[end] = int(np.argmin(value))
                following[end] = value[choice[end]]
            best = following
            choices.append(choice)
        bounds = [self.count]
        for choice in reversed(choices):
            bounds.append(int(choice[bounds[-1]]))
        return float(best[self.count]), bounds[::-1]


def _prefix(values: Sequence[float] | npt.NDArray[np.bool_]) -> Floats:
    return np.concatenate([[0.0], np.cumsum(np.asarray(values, dtype=np.float64))])
