"""``wall_clock_offset`` by clocks between whose readings the process is stopped."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from opensmd.environment.wall_clock import wall_clock_offset

APART = 10**18


@pytest.fixture
def stops(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Clocks that are ``APART``; a reading takes 10 ns, and a stop of 5 s follows the listed ones."""
    now, readings, stopped = 0, 0, list[int]()

    def read() -> int:
        nonlocal now, readings
        now += 10
        at = now
        now += 5 * 10**9 * (readings in stopped)
        readings += 1
        return at

    monkeypatch.setattr(time, "perf_counter_ns", read)
    monkeypatch.setattr(time, "time_ns", lambda: read() + APART)
    yield stopped


@pytest.mark.parametrize("number", range(4))
def test_a_stop_between_two_readings_does_not_count(stops: list[int], number: int) -> None:
    stops.append(number)

    assert wall_clock_offset() == APART


def test_adds_up_to_the_wall_clock() -> None:
    offset = wall_clock_offset()
    before = time.time_ns()
    seen = time.perf_counter_ns() + offset
    after = time.time_ns()

    # The difference of the clocks is known as exactly as one can be read.
    assert before - 10**6 <= seen <= after + 10**6
