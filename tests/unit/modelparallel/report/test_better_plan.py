"""What is said of a better plan."""

from __future__ import annotations

from dataclasses import replace

from opensmd.modelparallel.planning.measured import BetterPlan, StageTimes
from opensmd.modelparallel.planning.plan import Plan, StageLoad
from opensmd.modelparallel.report.better_plan import better_plan_text


def said(now: float, better: float) -> str:
    """Of two stages, for steps of these seconds."""
    plan = Plan(
        stages=2,
        homes={"": 0, "first": 0, "second": 1},
        loads=(StageLoad(forward_seconds=1.0), StageLoad(forward_seconds=1.0)),
    )
    other = replace(plan, homes={"": 0, "first": 1, "second": 1})
    found = BetterPlan(apart=0.5, seconds=now, plan=other, better_seconds=better)
    times = [StageTimes(0.001, 0.002), StageTimes(0.002, 0.004)]
    return better_plan_text(plan, times, found, replans=False)


def test_two_step_times_are_said_with_as_many_digits_as_tell_them_apart() -> None:
    assert "takes about 70 instead of 100 ms (30% less): 'first' to partition 1" in said(0.1, 0.07)
    assert "takes about 7.1 instead of 7.4 ms (4% less)" in said(0.0074, 0.0071)
    assert "takes about 7 instead of 8 ms" in said(0.0076, 0.0074)
