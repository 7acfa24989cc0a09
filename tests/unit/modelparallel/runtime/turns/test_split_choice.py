"""How many backwards run in two parts follows from what the first steps have taken."""

from __future__ import annotations

import pytest

from opensmd.modelparallel.runtime.turns.record import Record
from opensmd.modelparallel.runtime.turns.split_choice import AGAIN, FIRST, MEASURED, SplitChoice
from tests.support.rank_schedules import rank_schedules

COUNT = 8  # microbatches


class Recorded(Record):
    """The backwards of a step: whole ones of 10 ticks, the others of ``first`` and ``weights``."""

    def __init__(self, splits_from: int, first: int, weights: int) -> None:
        super().__init__()
        for microbatch in range(COUNT):
            split = microbatch >= splits_from
            self._ended.append((microbatch, "forward", 0, 5))
            self._ended.append((microbatch, "backward", 0, first if split else 10))
            if split and weights:
                self._ended.append((microbatch, "weights", 0, weights))


def run(choice: SplitChoice, steps: int, first: int, weights: int, *, noise: int = 0) -> list[int]:
    """How many backwards each step has split."""
    splits = []
    for step in range(steps):
        splits_from = choice.splits_from(COUNT)
        splits.append(COUNT - splits_from)
        late = noise if step % 2 else 0
        choice.step_has_ended(COUNT, Recorded(splits_from, first + late, weights + late))
    return splits


def last(partitions: int, pipeline: str = "interleaved") -> SplitChoice:
    return SplitChoice(rank_schedules(partitions, pipeline)[-1])


def chosen(
    partitions: int, first: int, weights: int, *, pipeline: str = "interleaved", noise: int = 0
) -> int:
    return run(last(partitions, pipeline), FIRST + MEASURED + 1, first, weights, noise=noise)[-1]


@pytest.mark.parametrize(
    ("partitions", "first", "weights", "expected"),
    [
        (2, 5, 5, 2),  # two ranks gain nothing by more
        (4, 5, 5, 8),
        (4, 6, 5, 8),
        (4, 6, 7, 4),  # 4 ticks earlier, but 3 ticks of work are too much for all
        (2, 9, 4, 2),  # which the drain hides
        (2, 9, 8, 0),  # and here it does not
        (2, 10, 1, 0),
        (4, 11, 3, 0),
        (4, 10, 0, 0),  # nothing waits
    ],
)
def test_a_backward_is_split_where_it_gains_more_than_it_costs(
    partitions: int, first: int, weights: int, expected: int
) -> None:
    assert chosen(partitions, first, weights) == expected


def test_in_a_v_all_are_split_where_that_costs_little() -> None:
    assert [chosen(2, 5, weights, pipeline="v") for weights in (5, 7)] == [8, 2]


def test_other_work_of_the_machine_does_not_count() -> None:
    assert chosen(4, 5, 5, noise=30) == 8


def test_the_last_backwards_are_split_until_there_are_measurements() -> None:
    measured = [4] * (FIRST + MEASURED)
    assert run(last(4), FIRST + MEASURED + 2, 5, 5) == [*measured, 8, 8]
    assert run(last(4), FIRST + MEASURED + 2, 10, 3) == [*measured, 0, 0]


def test_there_is_always_a_whole_backward_to_compare_with() -> None:
    assert [last(4).splits_from(count) for count in (2, 3, 4, 8)] == [1, 1, 1, 4]
    assert last(4).splits_from(1) == 1


@pytest.mark.parametrize(("pipeline", "split"), [("zero_bubble", 8), ("1f1b", 0)])
def test_schedules_that_are_made_of_parts_are_not_measured(pipeline: str, split: int) -> None:
    assert run(last(4, pipeline), 6, 10, 3) == [split] * 6


def test_steps_are_measured_again_after_a_while() -> None:
    choice = last(4)
    assert run(choice, AGAIN, 10, 3)[-1] == 0
    assert run(choice, FIRST + MEASURED + 1, 5, 5)[-1] == 8
