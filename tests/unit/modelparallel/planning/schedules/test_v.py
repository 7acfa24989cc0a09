"""The V: what its docstring promises, for many numbers of ranks and microbatches."""

from __future__ import annotations

import pytest

from opensmd.modelparallel.planning.schedules.playing import play
from opensmd.modelparallel.planning.schedules.v import zero_bubble_v

COUNTS = [(ranks, microbatches) for ranks in (1, 2, 3, 5) for microbatches in (1, 2, 4, 9, 16)]


@pytest.mark.parametrize(("ranks", "microbatches"), COUNTS)
def test_each_rank_does_everything_once_in_an_order_that_can_be_followed(
    ranks: int, microbatches: int
) -> None:
    table = zero_bubble_v(ranks, microbatches)
    for row in table.rows:
        everything = {
            (kind, microbatch, chunk)
            for kind in "FBW"
            for microbatch in range(microbatches)
            for chunk in (0, 1)
        }
        assert len(row) == len(everything) and set(map(tuple, row)) == everything
    play(table, {"F": 1.0, "B": 1.3, "W": 0.7}, sending=0.1)


@pytest.mark.parametrize(("ranks", "microbatches"), COUNTS)
def test_a_rank_keeps_no_more_than_1f1b_does_on_its_first(ranks: int, microbatches: int) -> None:
    # There, all ranks but the last have one microbatch more in flight than follow them; a stage here is half.
    assert max(play(zero_bubble_v(ranks, microbatches), {"F": 1, "B": 1, "W": 1}).kept) <= 2 * ranks


@pytest.mark.parametrize("ranks", [2, 3, 4, 6])
def test_with_equal_times_and_enough_microbatches_nobody_waits_between_first_and_last(ranks: int) -> None:
    assert play(zero_bubble_v(ranks, 2 * ranks), {"F": 1, "B": 1, "W": 1}).idle == [0] * ranks


def test_the_first_rank_has_the_beginning_and_the_loss() -> None:
    assert zero_bubble_v(4, 8).stages[0] == (0, 7)
