"""Comparing a plan with its stages' measured times: would another be better, and by how much? Pure.

Estimates are in seconds of no particular machine, so each stage's share of the whole is compared. Within a
stage, the measured time is divided in proportion to its units' estimates, or evenly without any.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from opensmd.modelparallel.planning.plan import Plan
from opensmd.modelparallel.planning.predict import comes_back
from opensmd.modelparallel.planning.simulate import seconds_of_step
from opensmd.modelparallel.planning.trace import ModelTrace, Unit

__all__ = [
    "WORTH_A_MOVE",
    "WORTH_A_WORD",
    "BetterPlan",
    "StageTimes",
    "Worth",
    "apart",
    "better_plan",
    "with_measured_times",
    "with_times",
]


class Worth(NamedTuple):
    """How far stages must deviate from the plan, and what share of a step a better plan must save."""

    apart: float
    saved: float


WORTH_A_WORD = Worth(apart=0.1, saved=0.03)
# If requested, any gain counts that exceeds the variation between two steps.
WORTH_A_MOVE = Worth(apart=0.02, saved=0.01)
# Of a microbatch on the busiest stage; below, messages and turns outweigh what a plan can change.
LEAST_SECONDS = 2e-3


class StageTimes(NamedTuple):
    """The time of one microbatch on a stage, with all of its backward, whenever that ran.

    ``weights`` is the part of the backward that ran later; None if all of it ran at once.
    """

    forward: float
    backward: float
    weights: float | None = None


@dataclass(frozen=True, kw_only=True)
class BetterPlan:
    """What measured times say about the plan that was followed.

    Attributes:
        apart: how far a stage's share is from the planned one, at most.
        seconds: of a step with the plan that was followed and the measured times.
        plan: the better one; None if there is none.
        better_seconds: of a step with that plan.
    """

    apart: float
    seconds: float
    plan: Plan | None
    better_seconds: float

    @property
    def saved(self) -> float:
        """The share of a step that the better plan saves."""
        return 1 - self.better_seconds / self.seconds


def apart(planned: Sequence[float], measured: Sequence[float]) -> float:
    """Return the largest deviation of a stage's share of ``measured`` from the plan, in fair shares."""
    whole, taken = sum(planned), sum(measured)
    if not taken:
        return 0.0
    shares = [seconds / whole for seconds in planned] if whole else [1 / len(planned)] * len(planned)
    differences = (abs(share - seconds / taken) for share, seconds in zip(shares, measured, strict=True))
    return len(planned) * max(differences)


def with_measured_times(trace: ModelTrace, plan: Plan, measured: Sequence[StageTimes]) -> ModelTrace:
    """Return ``trace`` with its units' seconds scaled to the measured times of ``plan``'s stages."""
    stages = [plan.homes[decider] for decider in trace.deciders]
    units = list(trace.units)
    for stage, times in enumerate(measured):
        own = [index for index, home in enumerate(stages) if home == stage]
        forwards = _shared_out(times.forward, [units[index].forward_seconds for index in own])
        backwards = _shared_out(times.backward, [units[index].backward_seconds for index in own])
        for index, forward, backward in zip(own, forwards, backwards, strict=True):
            units[index] = _timed(units[index], forward, backward)
        if times.weights is not None:
            lates = _shared_out(times.weights, [units[index].late_seconds for index in own])
            for index, late in zip(own, lates, strict=True):
                units[index] = replace(units[index], late_seconds=min(late, units[index].backward_seconds))
    return replace(trace, units=tuple(units), measured=True)


def better_plan(
    trace: ModelTrace,
    plan: Plan,
    measured: Sequence[StageTimes],
    make: Callable[[ModelTrace], Plan],
    *,
    microbatches: int,
    worth: Worth = WORTH_A_WORD,
) -> BetterPlan | None:
    """Return what to do about a plan whose stages have taken ``measured``; None if that is as planned.

    Args:
        trace: what the plan was made from.
        plan: the plan that was followed.
        measured: the times by stage.
        make: makes a plan from a trace.
        microbatches: those of a step.
        worth: the smallest differences and savings that count.
    """
    taken = [times.forward + times.backward for times in measured]
    difference = apart([load.seconds for load in plan.loads], taken)
    if difference <= worth.apart or max(taken) < LEAST_SECONDS:
        return None
    timed = with_measured_times(trace, plan, measured)
    seconds = _step_seconds(with_times(plan, measured), microbatches)
    other = make(timed)
    better = _step_seconds(other, microbatches)
    if other.homes == plan.homes or better > (1 - worth.saved) * seconds:
        return BetterPlan(apart=difference, seconds=seconds, plan=None, better_seconds=seconds)
    return BetterPlan(apart=difference, seconds=seconds, plan=other, better_seconds=better)


def _step_seconds(plan: Plan, microbatches: int) -> float:
    return seconds_of_step(plan.loads, microbatches, in_a_v=comes_back(plan))


def with_times(plan: Plan, measured: Sequence[StageTimes]) -> Plan:
    """Return ``plan`` with measured loads; weight gradients that did not run late keep their share."""
    loads = [
        replace(
            load,
            forward_seconds=times.forward,
            backward_seconds=times.backward,
            late_seconds=(
                _part(load.late_seconds, load.backward_seconds) * times.backward
                if times.weights is None
                else min(times.weights, times.backward)
            ),
        )
        for load, times in zip(plan.loads, measured, strict=True)
    ]
    return replace(plan, loads=tuple(loads))


def _timed(unit: Unit, forward: float, backward: float) -> Unit:
    late = _part(unit.late_seconds, unit.backward_seconds) * backward
    return replace(unit, forward_seconds=forward, backward_seconds=backward, late_seconds=late)


def _shared_out(seconds: float, estimates: Sequence[float]) -> list[float]:
    whole = sum(estimates)
    if not whole:
        return [seconds / len(estimates)] * len(estimates) if estimates else []
    return [seconds * estimate / whole for estimate in estimates]


def _part(part: float, whole: float) -> float:
    return part / whole if whole else 0.0
