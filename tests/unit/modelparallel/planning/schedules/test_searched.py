"""Tables that are searched for: complete, within memory, and never longer than the published ones."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from opensmd.modelparallel.planning.schedules.playing import play
from opensmd.modelparallel.planning.schedules.searched import published, searched
from opensmd.modelparallel.planning.schedules.tables import (
    Action,
    ChunkTimes,
    Table,
    in_a_v,
    looped,
)

SLOW_MIDDLE = [ChunkTimes(1, 1, 1), ChunkTimes(1, 2, 1), ChunkTimes(1, 1, 1)]


def best_published(
    stages: Sequence[Sequence[int]], times: Sequence[ChunkTimes], microbatches: int, limit: int
) -> float:
    played = [play(table, times) for table in published(stages, microbatches)]
    return min((each.seconds for each in played if max(each.kept) <= limit), default=float("inf"))


def require_sound(table: Table, times: Sequence[ChunkTimes], microbatches: int, limit: int) -> None:
    """Every rank does all of its actions once, and keeps no more than it may."""
    for row, own in zip(table.rows, table.stages, strict=True):
        wanted = {
            Action(kind, microbatch, chunk)  # type: ignore[arg-type]
            for kind in "FBW"
            for microbatch in range(microbatches)
            for chunk in range(len(own))
        }
        assert len(row) == len(wanted) and set(row) == wanted
    assert max(play(table, times).kept) <= limit


def test_a_slow_stage_in_the_middle_waits_less_than_in_the_published_table() -> None:
    table = searched(looped(3), SLOW_MIDDLE, 4, most_kept=3)
    played = play(table, SLOW_MIDDLE)
    assert best_published(looped(3), SLOW_MIDDLE, 4, 3) == 18
    assert played.seconds == 17
    assert (
        played.chart()
        == textwrap.dedent(
            """
            F0 F1 F2 .  .  .  B0 W0 F3 B1 W1 .  B2 .  B3 W2 W3
            .  F0 F1 F2 B0 B0 B1 B1 W0 F3 B2 B2 B3 B3 W1 W2 W3
            .  .  F0 B0 F1 B1 F2 B2 W0 W1 F3 B3 W2 W3
            """
        ).strip()
    )
    assert str(table).startswith("rank 0   F0 F1 F2 B0 W0")


@pytest.mark.parametrize(
    ("times", "microbatches", "limit"),
    [
        ([(1, 1, 1), (2, 2, 1), (1, 2, 1)], 8, 3),
        ([(1, 1, 1), (1, 3, 1), (2, 2, 1), (1, 2, 3)], 8, 4),
        ([(1, 2, 0.5), (1, 1.5, 0.3), (2, 2, 1), (1, 2, 1)], 12, 6),
    ],
)
def test_uneven_stages_have_better_tables_than_the_published_ones(
    times: list[tuple[float, float, float]], microbatches: int, limit: int
) -> None:
    stages, costs = looped(len(times)), [ChunkTimes(*each) for each in times]
    table = searched(stages, costs, microbatches, most_kept=limit)
    require_sound(table, costs, microbatches, limit)
    assert play(table, costs).seconds < best_published(stages, costs, microbatches, limit)


PART = st.sampled_from([0.0, 0.5, 1.0, 2.0, 3.0])


@given(
    ranks=st.integers(1, 4),
    in_v=st.booleans(),
    microbatches=st.integers(1, 6),
    more=st.integers(0, 4),
    parts=st.lists(st.tuples(st.sampled_from([0.5, 1.0, 2.0]), PART, PART), min_size=8, max_size=8),
)
@settings(max_examples=40, deadline=None)
def test_no_published_table_within_the_same_memory_is_shorter(
    ranks: int, in_v: bool, microbatches: int, more: int, parts: list[tuple[float, float, float]]
) -> None:
    stages = in_a_v(ranks) if in_v else looped(ranks)
    limit = len(stages[0]) + more
    times = [ChunkTimes(*each) for each in parts[: ranks * len(stages[0])]]
    table = searched(stages, times, microbatches, most_kept=limit, effort=2000)
    require_sound(table, times, microbatches, limit)
    assert play(table, times).seconds <= best_published(stages, times, microbatches, limit) * (1 + 1e-9)
    assert table == searched(stages, times, microbatches, most_kept=limit, effort=2000), "on every rank"


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(ValueError, match="3 stages need as many times, got 2"):
        searched(looped(3), SLOW_MIDDLE[:2], 4, most_kept=3)
    with pytest.raises(ValueError, match="rank 0 has 2 chunks, and may not keep 1 of them at once"):
        searched(in_a_v(1), SLOW_MIDDLE[:2], 4, most_kept=1)
    with pytest.raises(ValueError, match="at least one rank, microbatch and chunk, got 3, 0 and 1"):
        searched(looped(3), SLOW_MIDDLE, 0, most_kept=3)
