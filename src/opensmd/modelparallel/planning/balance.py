"""Cutting a sequence of costs into stages: the dynamic programming behind the partitioner.

There are two passes. The first finds the smallest possible worst stage. Among the splits whose worst stage is
hardly above that, the second finds the one with the cheapest cuts and the most even stages. So the
partitioner cuts at the borders of large modules, and inside them only if the stages would be unbalanced
otherwise. Nor does a stage begin with a module without parameters unless that makes a clear difference.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

__all__ = ["Sequence1D", "Split", "split_evenly"]

Floats = npt.NDArray[np.float64]

# By how much a split's worst stage may exceed the best one if its cuts are cheaper: less than the uncertainty
# of unit times, so nothing certain is lost.
TOLERANCE = 0.005
# How much better a split must be whose stages begin with items that may not be a stage's only one.
CLEARLY = 0.02
# the weight of a cut's cost against unevenness, among splits that are all good enough
CUT_WEIGHT = 20.0
# one step of the fold over stages: (best so far, this stage's load, its cut) by start -> value by start
Combine = Callable[[Floats, Floats, Floats], Floats]


@dataclass(frozen=True, kw_only=True)
class Sequence1D:
    """Items in order, with their shares of the objective (in any unit; the solver only compares sums).

    ``even`` is an item's share on any stage; ``staged`` is multiplied by ``weights[stage]`` (for activations,
    of which early stages hold more microbatches). ``cuts[s][k]`` is charged to both sides of a cut before
    item ``k`` between stage ``s`` and the next (``cuts[s][0]`` is ignored). ``fixed[k]`` is the stage that an
    item must be on, or -1. ``preload`` is a stage's load whatever the split. A stage needs at least one item
    that may be ``alone``, or that is fixed there.
    """

    even: Sequence[float]
    staged: Sequence[float]
    weights: Sequence[float]
    cuts: Sequence[Sequence[float]]
    fixed: Sequence[int]
    preload: Sequence[float]
    alone: Sequence[bool]


@dataclass(frozen=True, kw_only=True)
class Split:
    """Stage ``s`` has items ``bounds[s]`` to ``bounds[s + 1]``; ``worst`` is the largest stage's share."""

    bounds: tuple[int, ...]
    worst: float
    cut_cost: float


def split_evenly(items: Sequence1D, *, tolerance: float = TOLERANCE) -> Split:
    """Return the best contiguous split into ``len(items.weights)`` stages, without empty ones if possible.

    Raises:
        ValueError: the fixed stages decrease along the sequence, so no contiguous split exists.
    """
    problem, worst = _solved(items, strict=True)
    free, least = _solved(items, strict=False)
    if least * (1 + CLEARLY) < worst:
        problem, worst = free, least
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
    ends = {bound: stage for stage, bound in enumerate(bounds[1:-1])}  # if stages are empty, the last one's
    cuts = sum(float(problem.after(stage)[bound]) for bound, stage in ends.items())
    return Split(bounds=tuple(bounds), worst=max(loads), cut_cost=cuts)


def _solved(items: Sequence1D, *, strict: bool) -> tuple[_Problem, float]:
    """Return the problem without empty stages, if possible, and its smallest worst stage.

    Args:
        items: the sequence.
        strict: whether stages may only begin with items that may be alone.
    """
    for allow_empty in (sum(_alone(items)) < len(items.weights), True):
        problem = _Problem(items, allow_empty=allow_empty, strict=strict)
        worst, _ = problem.solve(lambda best, load, cut: np.maximum(best, load))
        if np.isfinite(worst):
            break  # else fixed stages may leave nothing for a stage between them
    return problem, worst


class _Problem:
    """Prefix sums of the items, and the recursion over stages."""

    def __init__(self, items: Sequence1D, *, allow_empty: bool, strict: bool) -> None:
        self.count = len(items.even)
        self.stages = len(items.weights)
        self.even = _prefix(items.even)
        self.staged = _prefix(items.staged)
        self.weights = items.weights
        self.empty = 0.0 if allow_empty else np.inf
        self.preload = items.preload
        self._cuts = np.zeros((self.stages + 1, self.count + 1))  # before the first stage and after each
        for stage, cuts in enumerate(items.cuts):
            self._cuts[stage + 1, 1 : self.count] = np.asarray(cuts, dtype=np.float64)[1:]
        fixed = np.asarray(items.fixed, dtype=np.int64)
        alone = np.asarray(_alone(items), dtype=np.bool_)
        # whether a stage may begin with item k
        self.begins = np.ones(self.count + 1, dtype=np.bool_)
        if strict:
            self.begins[1 : self.count] = alone[1:]
        # how many items up to k may be a stage's only one
        self.alone = _prefix(alone)
        # how many items up to k must not be on stage s
        self.barred = [_prefix((fixed >= 0) & (fixed != stage)) for stage in range(self.stages)]

    def after(self, stage: int) -> Floats:
        """Return the cost of a cut after ``stage``, by the item that it precedes."""
        cuts: Floats = self._cuts[stage + 1]
        return cuts

    def loads(self, stage: int, end: int) -> Floats:
        """Return the share of ``stage`` with items ``start`` to ``end``, for every ``start <= end``."""
        starts = slice(0, end + 1)
        load = self.even[end] - self.even[starts]
        load = load + self.weights[stage] * (self.staged[end] - self.staged[starts])
        load = load + self.after(stage - 1)[starts] + self.after(stage)[end]
        load[(self.alone[end] == self.alone[starts]) | ~self.begins[starts]] = np.inf
        load[end] = self.empty  # an empty stage does not send or receive
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


def _alone(items: Sequence1D) -> list[bool]:
    """Return which items may be a stage's only one."""
    return [may or stage >= 0 for may, stage in zip(items.alone, items.fixed, strict=True)]


def _prefix(values: Sequence[float] | npt.NDArray[np.bool_]) -> Floats:
    return np.concatenate([[0.0], np.cumsum(np.asarray(values, dtype=np.float64))])
