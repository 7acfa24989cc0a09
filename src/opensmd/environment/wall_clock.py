"""The wall clock beside ``time.perf_counter_ns()``: what times of several hosts are brought together by."""

from __future__ import annotations

import time

__all__ = ["wall_clock_offset"]

READINGS = 8  # of both clocks: a process may be stopped between one and the other, but hardly every time


def wall_clock_offset() -> int:
    """What is to be added to ``time.perf_counter_ns()`` to get ``time.time_ns()``; in ns."""
    return min(_reading() for _ in range(READINGS))[1]


def _reading() -> tuple[int, int]:
    """How long it took to read both clocks, and how far they are apart."""
    before = time.perf_counter_ns()
    wall = time.time_ns()
    after = time.perf_counter_ns()
    return after - before, wall - (before + after) // 2
