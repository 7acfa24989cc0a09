"""The bubble and the memory that a plan foretells."""

from __future__ import annotations

from dataclasses import replace

import pytest

from opensmd.modelparallel.planning.plan import Plan, StageLoad
from opensmd.modelparallel.planning.predict import bubble
from tests.unit.modelparallel.small_plan import make_plan


def test_the_predicted_bubble_of_even_stages_is_the_textbooks() -> None:
    loads = tuple(
        StageLoad(forward_seconds=1.0, backward_seconds=2.0, in_flight=most) for most in (4, 4, 3, 1)
    )
    assert bubble(Plan(stages=4, homes={"": 0}, loads=loads), 4) == pytest.approx(3 / 7)
    assert bubble(Plan(stages=4, homes={"": 0}), 4) == pytest.approx(3 / 7)  # nothing known: assume even
    assert bubble(make_plan(1), 4) == pytest.approx(0)
    uneven = (loads[0], StageLoad(forward_seconds=3.0, backward_seconds=6.0))
    # the slow stage works all the time but the first: 8 microbatches of 9 and 3 before them
    assert bubble(Plan(stages=2, homes={"": 0}, loads=uneven), 8) == pytest.approx(1 - 8 * 12 / (2 * 75))
    assert bubble(Plan(stages=2, homes={"": 0}, loads=uneven), 800) == pytest.approx(
        1 - 800 * 12 / (2 * 7203)
    )


def test_gradients_of_weights_that_are_computed_late_fill_some_of_the_bubble() -> None:
    def even(stages: int, late: int) -> Plan:
        return Plan(
            stages=stages,
            homes={"": 0},
            loads=tuple(
                StageLoad(
                    forward_seconds=1.0,
                    backward_seconds=2.0,
                    late_seconds=1.0,
                    in_flight=1 if stage == stages - 1 else stages - stage + 1,
                    late=late if stage else 0,
                )
                for stage in range(stages)
            ),
        )

    # as in the paper on zero-bubble schedules: of a wait of 1 + 2 seconds 1 + 1 - 1 are left
    assert bubble(even(2, 4), 8) == pytest.approx(1 - 8 * 3 / (8 * 3 + 1))
    for stages in (2, 3, 4):
        textbook = (stages - 1) / (8 + stages - 1)
        assert bubble(even(stages, 0), 8) == pytest.approx(textbook)
        assert bubble(even(stages, stages + 2), 8) <= bubble(even(stages, stages), 8) < textbook


def test_the_peak_counts_what_late_gradients_keep() -> None:
    load = StageLoad(
        training_bytes=1000, activation_bytes=100, late_input_bytes=40, late_gradient_bytes=30, in_flight=1
    )
    assert (load.memory_bytes, load.waiting_bytes) == (1100, 0)
    # in the last backward: what the one before keeps, all of its own, and its own gradients
    late = replace(load, late=2)
    assert (late.memory_bytes, late.waiting_bytes) == (1000 + 70 + 100 + 30, 140)
    assert replace(late, in_flight=4).memory_bytes == 1400  # while four forwards wait, none is late yet
