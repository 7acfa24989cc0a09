"""What is said of a build that goes on: how long it will take, and when nothing is said at all."""

from __future__ import annotations

import io

import pytest

from opensmd.native import progress
from opensmd.native.progress import BuildProgress, expected_pace


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    return now


def test_before_a_step_is_done_the_machines_pace_counts(clock: list[float]) -> None:
    assert BuildProgress([10, 20], workers=1, what="it", pace=2.0).remaining() == 60.0
    assert BuildProgress([10, 20], workers=2, what="it").remaining() == 15.0


def test_what_is_done_tells_how_fast_the_rest_will_go(clock: list[float]) -> None:
    build = BuildProgress([10, 20], workers=1, what="it")
    with build.step(10):
        clock[0] = 30.0
    assert build.remaining() == 60.0  # three times as slow as expected


def test_a_step_that_is_late_is_never_quite_done(clock: list[float]) -> None:
    build = BuildProgress([10], workers=1, what="it")
    with build.step(10):
        clock[0] = 4.0
        assert build.remaining() == 6.0
        clock[0] = 40.0
        assert build.remaining() == pytest.approx(4.0)


def test_a_step_that_fails_is_not_counted(clock: list[float]) -> None:
    build = BuildProgress([10], workers=1, what="it")
    with pytest.raises(OSError, match="full"), build.step(10):
        raise OSError("full")
    assert build.remaining() == 10.0


def test_a_quick_build_says_nothing_and_a_slow_one_how_long_and_why() -> None:
    quick, slow = io.StringIO(), io.StringIO()
    with BuildProgress([1], workers=1, what="it", out=quick):
        pass
    assert quick.getvalue() == ""
    build = BuildProgress([100], workers=1, what="the core", pace=2.0, out=slow)
    build._ended.set()
    build._show_lines()
    assert slow.getvalue() == (
        "opensmd: compiling the core, about 200 s left (other processes keep the machine busy)\n"
    )


def test_the_pace_is_that_of_processors_that_are_shared() -> None:
    assert expected_pace(2, running=0, processors=4) == 1.0
    assert expected_pace(2, running=6, processors=4) == 2.0
