"""What is said of a better plan."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

import pytest

from opensmd.modelparallel.planning.measured import BetterPlan, StageTimes
from opensmd.modelparallel.planning.plan import Plan, StageLoad
from opensmd.modelparallel.report.better_plan import better_plan_text


def said(
    now: float,
    better: float,
    homes: Mapping[str, int] = MappingProxyType({"": 0, "first": 0, "second": 1}),
    better_homes: Mapping[str, int] = MappingProxyType({"": 0, "first": 1, "second": 1}),
) -> str:
    """Of two stages, for steps of these seconds."""
    plan = Plan(
        stages=2,
        homes=homes,
        loads=(StageLoad(forward_seconds=1.0), StageLoad(forward_seconds=1.0)),
    )
    other = replace(plan, homes=better_homes)
    found = BetterPlan(apart=0.5, seconds=now, plan=other, better_seconds=better)
    times = [StageTimes(0.001, 0.002), StageTimes(0.002, 0.004)]
    return better_plan_text(plan, times, found, replans=False)


def test_two_step_times_are_said_with_as_many_digits_as_tell_them_apart() -> None:
    assert "takes about 70 instead of 100 ms (30% less): 'first' to partition 1" in said(0.1, 0.07)
    assert "takes about 7.1 instead of 7.4 ms (4% less)" in said(0.0074, 0.0071)
    assert "takes about 7 instead of 8 ms" in said(0.0076, 0.0074)


BLOCK = {"": 0, "block": 0, "block.0": 0, "block.1": 1, "block.2": 1, "block.2.inner": 1, "head": 1}


@pytest.mark.parametrize(
    ("moved", "text"),
    [
        ({"block.1": 0, "block.2": 0, "block.2.inner": 0}, "'block.1' to 'block.2' to partition 0"),
        ({"block": 1, "block.0": 1}, "'block.0' to partition 1"),
        ({"block": 1}, "'block' to partition 1"),
    ],
    ids=["back into a split module", "the rest of a split module", "what a split module has itself"],
)
def test_modules_that_move_are_named_where_their_parent_is_split_before_or_after(
    moved: dict[str, int], text: str
) -> None:
    assert f" less): {text}. " in said(0.1, 0.07, BLOCK, BLOCK | moved)
