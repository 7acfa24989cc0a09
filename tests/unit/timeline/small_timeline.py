"""A timeline of two ranks, for tests of what is made of timelines."""

from __future__ import annotations

from opensmd.timeline.files import Timeline
from opensmd.timeline.span import COLLECTIVES, PIPELINE, Span

__all__ = ["collective", "small_timeline"]


def collective(start: int, end: int, call: str = "world/0/1") -> Span:
    """A collective of 64 bytes, from ``start`` to ``end`` nanoseconds."""
    return Span(COLLECTIVES, "all_reduce", start, end, call=call, bytes=64)


def small_timeline() -> Timeline:
    """Rank 0 computes, rank 1 follows, and both meet in a collective, all in 100 nanoseconds."""
    return Timeline(
        {
            0: [Span(PIPELINE, "forward", 0, 40, 0), Span(PIPELINE, "wait", 40, 60), collective(60, 100)],
            1: [Span(PIPELINE, "wait", 0, 40), Span(PIPELINE, "forward", 40, 80, 0), collective(90, 100)],
        }
    )
