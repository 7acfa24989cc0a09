"""How each rank spent its time; pure.

A collective waits until its last rank has entered, and moves data from then on. If things overlap, work
counts first: a collective during a microbatch's forward costs nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from opensmd.timeline.span import COLLECTIVES, COMPUTE, PIPELINE, Span

__all__ = ["Shares", "last_entries", "shares", "waits_until"]

Interval = tuple[int, int]


@dataclass(frozen=True)
class Shares:
    """Parts of the whole time, adding up to one.

    Attributes:
        busy: everything else: microbatches, and what the script does around them.
        waiting: in collectives that not all ranks had entered.
        moving: in collectives that all had entered.
        bubble: in the pipeline, with nothing to do.
    """

    busy: float
    waiting: float
    moving: float
    bubble: float


def last_entries(ranks: Mapping[int, Sequence[Span]]) -> dict[str, tuple[int, int]]:
    """Return, for every collective, when its last rank entered and which rank that was."""
    last: dict[str, tuple[int, int]] = {}
    for rank, spans in ranks.items():
        for span in spans:
            if span.call:
                last[span.call] = max(last.get(span.call, (span.start_ns, rank)), (span.start_ns, rank))
    return last


def waits_until(span: Span, last: Mapping[str, tuple[int, int]]) -> int:
    """Return when a collective stopped waiting for other ranks to enter."""
    return min(max(last[span.call][0], span.start_ns), span.end_ns)


def shares(ranks: Mapping[int, Sequence[Span]], total_ns: int) -> dict[int, Shares]:
    """Return every rank's shares of ``total_ns``, which starts at zero."""
    last = last_entries(ranks)
    return {rank: _shares(spans, last, max(total_ns, 1)) for rank, spans in ranks.items()}


def _shares(spans: Sequence[Span], last: Mapping[str, tuple[int, int]], total: int) -> Shares:
    work: list[Interval] = []
    bubble: list[Interval] = []
    waiting: list[Interval] = []
    moving: list[Interval] = []
    for span in spans:
        if span.track == PIPELINE:
            (work if span.name in COMPUTE else bubble).append((span.start_ns, span.end_ns))
        elif span.track == COLLECTIVES and span.call:
            middle = waits_until(span, last)
            waiting.append((span.start_ns, middle))
            moving.append((middle, span.end_ns))
    covered = list(work)
    parts = []
    for kind in (waiting, moving, bubble):  # a collective inside a bubble is not a bubble
        before = _length(covered)
        covered += kind
        parts.append((_length(covered) - before) / total)
    return Shares(1 - sum(parts), *parts)


def _length(intervals: Sequence[Interval]) -> int:
    """Return the total length that the intervals cover."""
    covered = reached = 0
    for start, end in sorted(intervals):
        covered += max(0, end - max(start, reached))
        reached = max(reached, end)
    return covered
