"""A schedule follows what steps have taken: its search, its waits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from opensmd.modelparallel.planning.measured import StageTimes
from opensmd.modelparallel.planning.plan import StageLoad
from opensmd.modelparallel.planning.policies.patience import SHARE
from opensmd.modelparallel.planning.schedules.tables import Table
from opensmd.modelparallel.runtime.turns.adaptive_schedule import AdaptiveSchedule
from opensmd.modelparallel.runtime.turns.record import Record
from tests.support.rank_schedules import rank_schedules


class Recorded(Record):
    """A step of one microbatch whose backward has taken so many seconds."""

    def __init__(self, backward: float) -> None:
        super().__init__()
        self._ended.append((0, "backward", 0, round(backward * 1e9)))


def adaptive(pipeline: str, **settings: Any) -> AdaptiveSchedule:
    """That of the first of two ranks, whose plan knows no times yet."""
    planned = rank_schedules(2, pipeline, **settings)[0]
    return AdaptiveSchedule(replace(planned, plan=replace(planned.plan, loads=(StageLoad(), StageLoad()))))


def test_a_search_is_repeated_with_the_times_that_stages_have_taken() -> None:
    found: list[Table] = []

    def searched(search: Callable[[], Table]) -> Table:
        found.append(search())
        return found[-1]

    schedule = adaptive("searched", common=searched)
    schedule.policy(4, reduces=False)
    schedule.policy(4, reduces=False)
    assert len(found) == 1  # steps before the times are known have one table
    schedule.follow_times([StageTimes(0.001, 0.002, 0.001), StageTimes(0.010, 0.020, 0.010)])
    schedule.policy(4, reduces=False)
    assert len(found) == 2


def test_a_rank_waits_for_a_part_of_what_a_backward_has_taken() -> None:
    schedule = adaptive("interleaved")
    assert schedule.patience.seconds == 0
    schedule.step_has_ended(1, Recorded(backward=0.016))
    assert schedule.patience.seconds == pytest.approx(0.016 * SHARE)
    kept = schedule.patience
    schedule.follow_times([StageTimes(0.001, 0.002)] * 2)
    assert schedule.patience is kept  # what was learnt of waits holds for every order
