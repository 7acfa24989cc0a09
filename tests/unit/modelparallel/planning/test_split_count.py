"""How many backwards are worth taking in two parts."""

from __future__ import annotations

import pytest

from opensmd.modelparallel.planning.split_count import BackwardTimes, split_count


@pytest.mark.parametrize(
    ("times", "stage", "partitions", "count"),
    [
        (BackwardTimes(10, 5, 5), 1, 2, 2),  # nothing lost: the last ones, on two ranks
        (BackwardTimes(10, 5, 5), 1, 4, 8),  # and all of them on more
        (BackwardTimes(10, 9.9, 0.1), 1, 4, 0),  # the first part is hardly shorter
        (BackwardTimes(10, 10, 3), 1, 4, 0),
        (BackwardTimes(10, 5, 9), 1, 4, 2),  # what all would cost is more than three ranks gain
        (BackwardTimes(10, 9, 7), 1, 2, 0),  # and so would the last ones
        (BackwardTimes(10, 9, 7), 3, 4, 2),  # which ranks before this one hide
    ],
)
def test_so_many_are_split_as_pays(times: BackwardTimes, stage: int, partitions: int, count: int) -> None:
    assert split_count(times, stage=stage, partitions=partitions, microbatches=8, few=2) == count


@pytest.mark.parametrize(
    ("times", "partitions", "count"),
    [
        (BackwardTimes(10, 5, 5), 2, 8),  # nothing lost: two ranks gain half of what one leaves
        (BackwardTimes(10, 6, 5), 2, 2),  # six more would cost 6 ticks, for 2 that the first one gains
        (BackwardTimes(10, 6, 5), 8, 8),
        (BackwardTimes(10, 9.9, 0.1), 8, 0),
    ],
)
def test_in_a_v_two_ranks_may_gain_by_all(times: BackwardTimes, partitions: int, count: int) -> None:
    found = split_count(times, stage=1, partitions=partitions, microbatches=8, few=2, in_a_v=True)
    assert found == count
