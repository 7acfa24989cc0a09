"""What a rank does in which order follows from the plan and the settings alone."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest

from opensmd.modelparallel.planning.plan import Crossing, Plan
from opensmd.modelparallel.planning.policies.fixed_order import FixedOrder
from opensmd.modelparallel.planning.policies.policy import Progress
from opensmd.modelparallel.planning.policies.table_order import TableOrder
from opensmd.modelparallel.planning.schedules.tables import ChunkTimes, Table
from opensmd.modelparallel.planning.simulate import Part, RankPlayed, play_policies
from opensmd.modelparallel.runtime.turns import rank_schedule
from opensmd.modelparallel.runtime.turns.rank_schedule import RankSchedule
from tests.support.rank_schedules import rank_schedules


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


@pytest.mark.parametrize(("stage", "window"), [(0, 5), (1, 3), (2, 1)])
def test_a_rank_of_a_chain_has_the_window_of_its_stage(stage: int, window: int) -> None:
    policy = schedule((0, 1), (1, 2), stage=stage, pipeline="1f1b").policy(8, reduces=False)
    assert isinstance(policy, TableOrder)
    assert (policy.window, policy.most_kept, policy.chunks, policy.forwards_first) == (window, 5, 1, False)


def test_a_placement_that_comes_back_has_the_same_window_everywhere() -> None:
    for stage in range(3):
        policy = schedule((0, 1), (1, 0), stage=stage).policy(8, reduces=False)
        assert isinstance(policy, TableOrder) and policy.window == 3


@pytest.mark.parametrize("active", [2, 3, 4, 5, 9])
@pytest.mark.parametrize("pipeline", ["interleaved", "zero_bubble"])
def test_a_chain_takes_the_memory_that_it_may_and_finds_useful(pipeline: str, active: int) -> None:
    ranks = rank_schedules(4, pipeline, active_microbatches=active)
    times = [ChunkTimes(1.0, 1.0, 1.0)]
    parts = play_policies(
        [RankPlayed(rank.policy(12, reduces=False), (rank.stage,), times) for rank in ranks], 12
    )
    most = min(active, 4 + 3 if pipeline == "zero_bubble" else 4 + 2)
    assert [most_kept([part for part in parts if part.stage == stage]) for stage in range(4)] == [most] * 4


def most_kept(parts: list[Part]) -> int:
    """Microbatches between the beginning of their forward and the end of their weight gradients."""
    kept = [{"F": 1, "B": 0, "W": -1}[part.kind] for part in parts]
    return max(itertools.accumulate(kept))


V = ((0, 1), (1, 2), (2, 1), (1, 0))


def test_only_a_placement_in_a_v_has_the_order_of_a_v() -> None:
    """The last rank has the two stages in the middle, which microbatches pass at once."""
    chunks = [schedule(*V, stage=stage, pipeline="v").policy(8, reduces=False).chunks for stage in range(3)]
    assert chunks == [2, 2, 1]
    for other in (
        schedule((0, 1), (1, 2), pipeline="v"),
        schedule(*V, pipeline="interleaved"),
        schedule(*V, pipeline="v", active_microbatches=2),
        schedule(*V, pipeline="v", in_order=True),
    ):
        assert other.policy(8, reduces=False).chunks == 1


def test_what_is_searched_for_two_stages_a_rank_has_the_order_of_a_v() -> None:
    settings: dict[str, Any] = {"pipeline": "searched", "virtual_stages": 2}
    chunks = [schedule(*V, stage=stage, **settings).policy(6, reduces=False).chunks for stage in range(3)]
    assert chunks == [2, 2, 1]
    assert schedule((0, 1), (1, 2), **settings).policy(6, reduces=False).chunks == 1
    assert schedule(*V, pipeline="searched").policy(6, reduces=False).chunks == 1
    assert [schedule(*V, stage=stage, **settings).most_split(6) for stage in range(3)] == [6, 6, 6]


@pytest.mark.parametrize(("ways", "virtual_stages"), [(((0, 1), (1, 2)), 1), (V, 2)])
def test_a_rank_follows_the_table_that_was_found_for_all_and_asks_once(
    monkeypatch: pytest.MonkeyPatch, ways: tuple[tuple[int, int], ...], virtual_stages: int
) -> None:
    settings: dict[str, Any] = {"pipeline": "searched", "virtual_stages": virtual_stages}
    found: list[Table] = []

    def searched(search: Callable[[], Table]) -> Table:
        found.append(search())
        return found[-1]

    first = schedule(*ways, **settings, common=searched)
    for microbatches in (4, 4, 2):
        first.policy(microbatches, reduces=False)
    assert [len(table.rows) for table in found] == [3, 3], "once for each number of microbatches"
    monkeypatch.setattr(rank_schedule, "searched", None)  # nobody else searches
    other = schedule(*ways, stage=1, **settings, common=lambda search: found[0])
    assert other.policy(4, reduces=False).chunks == virtual_stages


@pytest.mark.parametrize(("microbatches", "chunks"), [(6, 2), (8, 1)])
def test_stages_in_a_loop_are_interleaved_if_the_ranks_divide_the_microbatches(
    microbatches: int, chunks: int
) -> None:
    looped = schedule((0, 1), (1, 2), (2, 0), virtual_stages=2)
    assert looped.policy(microbatches, reduces=False).chunks == chunks


def test_only_with_replicas_the_last_microbatch_is_held() -> None:
    progress = [Progress.AT_BACKWARD, Progress.AT_BACKWARD]
    for reduces in (False, True):
        policy = schedule((0, 1)).policy(2, reduces=reduces)
        assert [policy.holds(index, progress) for index in range(2)] == [False, reduces]
        assert not policy.holds(1, [Progress.DONE, Progress.AT_BACKWARD])


def test_an_order_that_all_ranks_share_does_not_choose() -> None:
    assert isinstance(schedule((0, 1), (1, 2), stage=2, in_order=True).policy(8, reduces=True), FixedOrder)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, [0, 8, 8]),
        ({"in_order": True}, [0, 8, 8]),
        ({"pipeline": "zero_bubble"}, [0, 8, 8]),
        ({"pipeline": "simple"}, [0, 2, 3]),
        ({"pipeline": "1f1b"}, [0, 0, 0]),
    ],
)
def test_which_microbatches_leave_weight_gradients_for_later(
    settings: dict[str, Any], expected: list[int]
) -> None:
    """None on a first stage, which sends no gradients to anybody."""
    schedules = [schedule((0, 1), (1, 2), stage=stage, **settings) for stage in range(3)]
    assert [each.most_split(8) for each in schedules] == expected


def test_two_ranks_leave_weight_gradients_of_the_last_backwards_alone() -> None:
    ways = rank_schedules(2, "interleaved")
    assert [each.most_split(8) for each in ways] == [0, 2]
    assert [each.most_split(8) for each in rank_schedules(2, "zero_bubble")] == [0, 8]
    assert [each.most_split(8) for each in rank_schedules(2, active_microbatches=1)] == [0, 1]
