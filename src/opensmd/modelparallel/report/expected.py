"""The step that a plan predicts, as events, to be drawn above the one that ran."""

from __future__ import annotations

from collections.abc import Sequence

from opensmd.modelparallel.planning.plan import Plan
from opensmd.modelparallel.planning.predict import comes_back
from opensmd.modelparallel.planning.simulate import Part, parts_of_step
from opensmd.modelparallel.report.events import PipelineEvent

__all__ = ["expected_events"]

_KINDS = {"F": "forward", "B": "backward", "W": "weights"}


def expected_events(plan: Plan, events: Sequence[PipelineEvent]) -> list[PipelineEvent]:
    """Return what ranks would have done according to ``plan``, scaled to the work in ``events``.

    Estimates are in seconds of no particular machine, so all are stretched by the same factor, to give the
    measured total work. Empty if the plan has no times.
    """
    microbatches = 1 + max((event.microbatch for event in events), default=-1)
    if not microbatches or not all(load.seconds for load in plan.loads):
        return []
    parts = parts_of_step(plan.loads, microbatches, in_a_v=comes_back(plan))
    worked = sum(event.end_ns - event.start_ns for event in events if event.kind != "wait")
    stretch = worked / sum(part.end - part.start for part in parts)
    begin = min(event.start_ns for event in events)
    drawn = [_event(part, stretch, begin) for part in parts]
    return sorted([*drawn, *_waits(drawn)], key=lambda event: (event.rank, event.start_ns))


def _event(part: Part, stretch: float, begin: int) -> PipelineEvent:
    return PipelineEvent(
        rank=part.stage,
        microbatch=part.microbatch,
        kind=_KINDS[part.kind],
        start_ns=begin + round(part.start * stretch),
        end_ns=begin + round(part.end * stretch),
    )


def _waits(drawn: Sequence[PipelineEvent]) -> list[PipelineEvent]:
    """Fill gaps with waiting, from the first event of all ranks to the last."""
    begin, end = min(event.start_ns for event in drawn), max(event.end_ns for event in drawn)
    waits = []
    for rank in {event.rank for event in drawn}:
        free = begin
        own = sorted((event.start_ns, event.end_ns) for event in drawn if event.rank == rank)
        for start, stop in [*own, (end, end)]:
            if start > free:
                waits.append(
                    PipelineEvent(rank=rank, microbatch=-1, kind="wait", start_ns=free, end_ns=start)
                )
            free = stop
    return waits
