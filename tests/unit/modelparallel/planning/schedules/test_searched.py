"""Tables that are searched for: complete, within memory, and never longer than the published ones."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from opensmd.modelparallel.planning.schedules.playing import play
from opensmd.modelparallel.planning.schedules.searched import published, searched
from opensmd.modelparallel.planning.schedules.tables import (
    Action,
    ChunkTimes,
    Table,
    fused,
    in_a_v,
    looped,
)
from opensmd.modelparallel.planning.schedules.v import zero_bubble_v

SLOW_MIDDLE = [ChunkTimes(1, 1, 1), ChunkTimes(1, 2, 1), ChunkTimes(1, 1, 1)]


def as_a_program_passes_a_v(ranks: int) -> tuple[tuple[int, ...], ...]:
    """The two stages in the middle, both the last rank's, are one."""
    return fused(zero_bubble_v(ranks, 1)).stages


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


@pytest.mark.parametrize(("ranks", "microbatches"), [(2, 4), (3, 6), (4, 8)])
def test_in_a_v_of_unlike_ranks_there_are_better_tables_than_the_published_one(
    ranks: int, microbatches: int
) -> None:
    """Within the memory of that one, which is what 1F1B keeps on its first rank."""
    stages = as_a_program_passes_a_v(ranks)
    limits = [ranks * len(own) for own in stages]
    of_ranks = [(1.0, 2.0, 1.0), (1.5, 1.5, 1.0), (1.0, 2.0, 1.0), (1.0, 1.5, 1.5)]
    times = {
        stage: ChunkTimes(*(2 * part / len(own) for part in parts))
        for own, parts in zip(stages, of_ranks, strict=False)
        for stage in own
    }
    costs = [times[stage] for stage in sorted(times)]
    paper = play(fused(zero_bubble_v(ranks, microbatches)), costs)
    found = play(searched(stages, costs, microbatches, most_kept=limits, effort=20_000), costs)
    for played in (paper, found):
        assert all(kept <= limit for kept, limit in zip(played.kept, limits, strict=True))
    assert found.seconds < paper.seconds


PART = st.sampled_from([0.0, 0.5, 1.0, 2.0, 3.0])


@given(
    ranks=st.integers(1, 4),
    lie=st.sampled_from([looped, in_a_v, as_a_program_passes_a_v]),
    microbatches=st.integers(1, 6),
    more=st.integers(0, 4),
    parts=st.lists(st.tuples(st.sampled_from([0.5, 1.0, 2.0]), PART, PART), min_size=8, max_size=8),
)
@settings(max_examples=40)
def test_no_published_table_within_the_same_memory_is_shorter(
    ranks: int,
    lie: Callable[[int], tuple[tuple[int, ...], ...]],
    microbatches: int,
    more: int,
    parts: list[tuple[float, float, float]],
) -> None:
    stages = lie(ranks)
    limit = len(stages[0]) + more
    times = [ChunkTimes(*each) for each in parts[: sum(map(len, stages))]]
    table = searched(stages, times, microbatches, most_kept=limit, effort=2000)
    require_sound(table, times, microbatches, limit)
    assert play(table, times).seconds <= best_published(stages, times, microbatches, limit) * (1 + 1e-9)
    assert table == searched(stages, times, microbatches, most_kept=limit, effort=2000), "on every rank"


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(ValueError, match="3 stages need 3 times, got 2"):
        searched(looped(3), SLOW_MIDDLE[:2], 4, most_kept=3)
    with pytest.raises(
        ValueError, match="rank 0 keeps at least one microbatch in each of its 2 chunks; most_kept is 1"
    ):
        searched(in_a_v(1), SLOW_MIDDLE[:2], 4, most_kept=1)
    with pytest.raises(ValueError, match="at least one rank, microbatch and chunk, got 3, 0 and 1"):
        searched(looped(3), SLOW_MIDDLE, 0, most_kept=3)
