"""Relating ``time.perf_counter_ns()`` to the wall clock, to combine times of several hosts."""

from __future__ import annotations

import time

__all__ = ["wall_clock_offset"]

READINGS = 8  # of both clocks: a process may be interrupted between them, but hardly every time


def wall_clock_offset() -> int:
    """Return what to add to ``time.perf_counter_ns()`` to get ``time.time_ns()``, in ns."""
    return min(_reading() for _ in range(READINGS))[1]


def _reading() -> tuple[int, int]:
    """Return how long reading both clocks took, and their difference."""
    before = time.perf_counter_ns()
    wall = time.time_ns()
    after = time.perf_counter_ns()
    return after - before, wall - (before + after) // 2
