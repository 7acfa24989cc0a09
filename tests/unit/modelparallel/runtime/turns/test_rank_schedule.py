"""What a rank does in which order follows from the plan and the settings alone."""

from __future__ import annotations

from typing import Any

import pytest

from opensmd.modelparallel.planning.plan import Crossing, Plan
from opensmd.modelparallel.planning.schedule import FixedOrder, Progress, ReadyFirst
from opensmd.modelparallel.runtime.turns.rank_schedule import RankSchedule


def schedule(*ways: tuple[int, int], stage: int = 0, **settings: Any) -> RankSchedule:
    crossings = tuple(Crossing(source=a, target=b, tensors=1, bytes=4) for a, b in ways)
    return RankSchedule(
        plan=Plan(stages=3, homes={"": 0}, crossings=crossings),
        stage=stage,
        partitions=3,
        **{"pipeline": "interleaved", "active_microbatches": 5, "in_order": False, **settings},
    )


def test_a_chain_is_what_goes_to_higher_stages_only() -> None:
    assert schedule((0, 1), (1, 2), (0, 2)).chain
    assert not schedule((0, 1), (1, 0)).chain
    assert not schedule().chain


@pytest.mark.parametrize(("stage", "window"), [(0, 4), (1, 3), (2, 1)])
def test_a_rank_of_a_chain_has_the_window_of_its_stage(stage: int, window: int) -> None:
    policy = schedule((0, 1), (1, 2), stage=stage).policy(8, reduces=False)
    assert isinstance(policy, ReadyFirst) and policy.window == window and not policy.simple


def test_a_placement_that_comes_back_has_the_same_window_everywhere() -> None:
    for stage in range(3):
        policy = schedule((0, 1), (1, 0), stage=stage).policy(8, reduces=False)
        assert isinstance(policy, ReadyFirst) and policy.window == 3


def test_only_with_replicas_the_last_microbatch_is_held() -> None:
    progress = [Progress.AT_BACKWARD, Progress.AT_BACKWARD]
    for reduces in (False, True):
        policy = schedule((0, 1)).policy(2, reduces=reduces)
        assert [policy.holds(index, progress) for index in range(2)] == [False, reduces]
        assert not policy.holds(1, [Progress.DONE, Progress.AT_BACKWARD])


def test_an_order_that_all_ranks_share_neither_splits_nor_chooses() -> None:
    fixed = schedule((0, 1), (1, 2), stage=2, in_order=True)
    assert isinstance(fixed.policy(8, reduces=True), FixedOrder)
    assert fixed.splits_from(8, reduces=False) == 8


@pytest.mark.parametrize(
    ("stage", "reduces", "expected"), [(0, False, 8), (1, False, 6), (2, False, 5), (2, True, 7)]
)
def test_the_last_microbatches_leave_weight_gradients(stage: int, reduces: bool, expected: int) -> None:
    assert schedule((0, 1), (1, 2), stage=stage).splits_from(8, reduces=reduces) == expected
