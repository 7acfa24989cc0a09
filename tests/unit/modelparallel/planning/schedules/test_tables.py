"""Tables by themselves: how they are written, where stages lie, and stages that become one."""

from __future__ import annotations

import pytest

from opensmd.modelparallel.planning.schedules.tables import (
    Action,
    ChunkTimes,
    Table,
    fused,
    in_a_v,
    looped,
    require_counts,
)


def test_actions_are_written_with_their_microbatch_and_a_letter_for_further_chunks() -> None:
    row = (Action("F", 0), Action("F", 11, 1), Action("B", 2, 2))
    assert str(Table("t", (row, ()), ((0, 2, 4), (1,)))) == "rank 0   F0 F11a B2b\nrank 1"


def test_every_stage_is_on_one_rank_and_neighbours_meet_at_the_ends_of_a_v() -> None:
    for stages in (looped(3, 2), in_a_v(3)):
        assert sorted(stage for own in stages for stage in own) == list(range(6))
    assert looped(3, 2)[0] == (0, 3) and in_a_v(3) == ((0, 5), (1, 4), (2, 3))


def test_a_table_splits_where_it_has_weight_gradients() -> None:
    whole = Table("t", ((Action("F", 0), Action("B", 0)),), ((0,),))
    assert not whole.splits and Table("t", ((*whole.rows[0], Action("W", 0)),), ((0,),)).splits


def test_times_are_looked_up_by_the_kind_of_action() -> None:
    times = ChunkTimes(1.0, 2.0, 3.0)
    assert [times.of(kind) for kind in ("F", "B", "W")] == [1.0, 2.0, 3.0]  # type: ignore[arg-type]


def test_two_stages_in_a_row_on_one_rank_begin_with_the_first_forward_and_the_last_backward() -> None:
    row = tuple(Action(kind, 0, chunk) for kind, chunk in (("F", 0), ("F", 1), ("B", 1), ("B", 0)))  # type: ignore[arg-type]
    one = fused(Table("t", (row,), ((0, 1),)))
    assert one.stages == ((0,),) and one.rows == ((Action("F", 0), Action("B", 0)),)


def test_stages_that_do_not_follow_each_other_stay_apart() -> None:
    rows = ((Action("F", 0), Action("F", 0, 1)), (Action("F", 0),))
    table = Table("t", rows, ((0, 2), (1,)))
    assert fused(table) == table


@pytest.mark.parametrize("counts", [(0, 1, (1,)), (1, 0, (1,)), (1, 1, (2, 0))])
def test_nothing_is_no_schedule(counts: tuple[int, int, tuple[int, ...]]) -> None:
    with pytest.raises(ValueError, match="at least one rank, microbatch and chunk"):
        require_counts(*counts)
