"""The loss scale of fp16 training: how it falls and rises, and what it refuses."""

from __future__ import annotations

import warnings
from typing import Any

import pytest

from opensmd.modelparallel.precision.loss_scale import LossScale


def scales(overflows: str, **settings: Any) -> list[float]:
    """The scale after each step; in ``overflows``, x is one and . is none."""
    scale = LossScale(dynamic=True, loss_scale=256.0, **settings)
    found = []
    for overflow in overflows:
        scale.update(overflow == "x")
        found.append(scale.loss_scale)
    return found


def test_a_dynamic_scale_halves_at_an_overflow_and_doubles_after_a_window_without() -> None:
    assert scales("..x...x.", scale_window=2) == [256, 512, 256, 256, 512, 512, 256, 256]
    assert scales("x...", scale_window=3, scale_factor=4) == [64, 64, 64, 256]


def test_a_delayed_shift_lets_overflows_pass_before_the_scale_falls() -> None:
    assert scales("xxx.x", delayed_shift=2) == [256, 128, 64, 64, 32], "used up until a window has passed"
    assert scales("x..xx", delayed_shift=2, scale_window=2) == [256, 256, 512, 512, 256], "a window renews it"
    consecutive = scales("x.xx", delayed_shift=2, consecutive_hysteresis=True)
    assert consecutive == [256, 256, 256, 128], "a step without an overflow renews it"


def test_a_scale_does_not_fall_below_its_minimum_and_says_once_that_nothing_is_learnt() -> None:
    with pytest.warns(UserWarning, match="overflow at the smallest loss scale, 128") as told:
        assert scales("xxx", min_scale=128) == [128, 128, 128]
    assert len(told) == 1


def test_a_static_scale_stays_and_one_that_is_loaded_goes_on_where_it_was() -> None:
    static = LossScale(loss_scale=8.0)
    static.update(overflow=True)
    assert static.apply() == static.loss_scale == static.cur_scale == 8.0
    first, second = (LossScale(dynamic=True, loss_scale=256.0, scale_window=3) for _ in range(2))
    for overflow in (True, False, False):
        first.update(overflow)
    second.load_state_dict(first.state_dict())
    static.load_state_dict(first.state_dict())
    for one in (first, second, static):
        one.update(overflow=False)
    assert (first.loss_scale, second.loss_scale, static.loss_scale) == (256.0, 256.0, 8.0)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"loss_scale": 0.0}, "a loss scale must be positive, got 0.0"),
        ({"scale_factor": 1}, "scale_factor must be more than 1, got 1"),
        ({"scale_window": 0}, "scale_window must be at least 1, got 0"),
        ({"min_scale": -1}, "min_scale must be positive, got -1"),
        ({"delayed_shift": 0}, "delayed_shift must be at least 1, got 0"),
    ],
)
def test_numbers_that_no_scale_can_have_are_refused(settings: dict[str, Any], message: str) -> None:
    with warnings.catch_warnings(), pytest.raises(ValueError, match=message):
        LossScale(dynamic=True, **settings)
