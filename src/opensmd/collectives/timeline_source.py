"""Hands the flight record's collectives to the timeline: what this rank has completed since the last look.

The record is a ring in shared memory that the core writes anyway. It holds the last 128 collectives of a
group, so a group that makes more between two looks leaves a gap, which is shown as one.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from opensmd.collectives import _torch_internals
from opensmd.timeline.recorder import recorder
from opensmd.timeline.span import COLLECTIVES, Span

__all__ = ["record_collectives"]


@functools.cache
def record_collectives(rank: int) -> None:
    """Begin to record what this process, ``rank`` of the job, does; if a timeline is wanted, and once."""
    wanted = recorder(rank)
    if wanted is not None:
        wanted.add_source(_Source())
        _torch_internals.before_groups_end(wanted.drain)


@dataclass
class _Seen:
    """How far one group's record has been read."""

    generation: int = 0  # of groups of this name
    sequence: int = 0


class _Source:
    """Asked by the recorder's thread."""

    def __init__(self) -> None:
        self._seen: dict[str, _Seen] = {}

    def __call__(self) -> Iterator[Span]:
        """New spans of all groups that exist now."""
        for name, rank, core in _torch_internals.groups_in_shared_memory():
            yield from self._of_group(name, rank, core)

    def _of_group(self, name: str, rank: int, core: Any) -> Iterator[Span]:
        completed = core.status(rank)["completed"]
        seen = self._seen.setdefault(name, _Seen())
        if completed < seen.sequence:
            seen.generation, seen.sequence = seen.generation + 1, 0
        new = completed - seen.sequence
        if not new:
            return
        entries = [e for e in core.record(rank) if seen.sequence < e["sequence"] <= completed and e["end_ns"]]
        lost = new - len(entries)
        if lost > 0 and entries:
            start = entries[0]["start_ns"]
            yield Span(COLLECTIVES, f"{lost} more, not recorded", start, start)
        seen.sequence = completed
        for entry in entries:
            call = f"{name}/{seen.generation}/{entry['sequence']}"
            times = entry["start_ns"], entry["end_ns"]
            yield Span(COLLECTIVES, entry["operation"], *times, call=call, bytes=entry["bytes"])
