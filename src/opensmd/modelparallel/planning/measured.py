"""A plan against what its stages have taken: would another one have been better, and by how much? Pure.

Estimates are in seconds of no particular machine, so what is compared is each stage's share of the whole.
Within a stage the measured time is shared out by the estimates of its units, evenly if these have none.
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
    """How far apart stages and plan must be, and what share of a step a better plan must save."""

    apart: float
    saved: float


WORTH_A_WORD = Worth(apart=0.1, saved=0.03)
# Who has asked for it shall have what there is to gain; it is beyond what two steps differ by.
WORTH_A_MOVE = Worth(apart=0.02, saved=0.01)
# Of a microbatch on the busiest stage: below, messages and turns outweigh what a plan can change.
LEAST_SECONDS = 2e-3


class StageTimes(NamedTuple):
    """What one microbatch has taken on a stage; all of its backward, whenever it ran.

    Of the backward, ``weights`` is what ran later; None where all of it ran at once.
    """

    forward: float
    backward: float
    weights: float | None = None


@dataclass(frozen=True, kw_only=True)
class BetterPlan:
    """What measured times say of the plan that was followed.

    Attributes:
        apart: how far the share of a stage is from the planned one, at most.
        seconds: of a step by the plan that was followed, with the measured times.
        plan: the better one; None where there is none.
        better_seconds: of a step by that.
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
    """How far a stage's share of ``measured`` is from the planned one, at most, as a part of a fair share."""
    whole, taken = sum(planned), sum(measured)
    if not taken:
        return 0.0
    shares = [seconds / whole for seconds in planned] if whole else [1 / len(planned)] * len(planned)
    differences = (abs(share - seconds / taken) for share, seconds in zip(shares, measured, strict=True))
    return len(planned) * max(differences)


def with_measured_times(trace: ModelTrace, plan: Plan, measured: Sequence[StageTimes]) -> ModelTrace:
    """``trace`` with the seconds of its units such that they add up to those of the stages of ``plan``."""
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
    """What to do about a plan whose stages have taken ``measured``; None if they are as planned.

    Args:
        trace: what the plan was made from.
        plan: the one that was followed.
        measured: by stage.
        make: makes a plan from a trace.
        microbatches: of a step.
        worth: smaller differences and savings are none.
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
    """``plan`` with the measured loads; weight gradients that have not run late keep their planned share."""
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
