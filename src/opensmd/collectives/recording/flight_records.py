"""Hands the flight record to the timeline: what this rank has completed since the last look.

The record is a ring in shared memory that the core writes anyway. It holds the last 128 collectives and the
last 128 messages of a group, so a group that makes more between two looks leaves a gap, which is shown.
Groups that have none are those of ``logged_calls``.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from opensmd.collectives import _torch_internals
from opensmd.timeline.span import COLLECTIVES, MESSAGES, Span

__all__ = ["FlightRecords"]


@dataclass
class _Seen:
    """How far one group's record has been read.

    Attributes:
        generation: of groups of this name.
        sequence: of the last collective.
        posted: the number of the last message that was begun.
        messages: numbers of those among the latest that were complete; they need not end in order.
    """

    generation: int = 0
    sequence: int = 0
    posted: int = 0
    messages: set[int] = field(default_factory=set)


class FlightRecords:
    """The records of all groups in shared memory of the process that is ``rank`` of the job; a source."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._seen: dict[str, _Seen] = {}

    def __call__(self) -> Iterator[Span]:
        """New spans of all groups that exist now."""
        for name, members, core in _torch_internals.groups_in_shared_memory():
            rank = members.index(self._rank)
            seen = self._seen.setdefault(name, _Seen())
            yield from _collectives(seen, name, rank, core)
            yield from _messages(seen, members, rank, core)


def _collectives(seen: _Seen, name: str, rank: int, core: Any) -> Iterator[Span]:
    completed = core.status(rank)["completed"]
    if completed < seen.sequence:
        seen.generation, seen.sequence = seen.generation + 1, 0
    new = completed - seen.sequence
    if not new:
        return
    entries = [e for e in core.record(rank) if seen.sequence < e["sequence"] <= completed and e["end_ns"]]
    if entries and new > len(entries):
        yield _gap(COLLECTIVES, new - len(entries), entries[0]["start_ns"])
    seen.sequence = completed
    for entry in entries:
        call = f"{name}/{seen.generation}/{entry['sequence']}"
        times = entry["start_ns"], entry["end_ns"]
        yield Span(COLLECTIVES, entry["operation"], *times, call=call, bytes=entry["bytes"])


def _messages(seen: _Seen, members: list[int], rank: int, core: Any) -> Iterator[Span]:
    entries = core.message_record(rank)
    if not entries:
        return
    if entries[-1]["sequence"] < seen.posted:  # another group of this name
        seen.posted, seen.messages = 0, set()
    lost = entries[0]["sequence"] - seen.posted - 1
    if lost > 0:
        yield _gap(MESSAGES, lost, entries[0]["start_ns"])
    seen.posted = entries[-1]["sequence"]
    complete = [entry for entry in entries if entry["end_ns"]]
    for entry in complete:
        if entry["sequence"] not in seen.messages:
            times = entry["start_ns"], entry["end_ns"]
            yield Span(MESSAGES, _message_name(entry, members), *times, bytes=entry["bytes"])
    seen.messages = {entry["sequence"] for entry in complete}


def _message_name(entry: dict[str, Any], members: list[int]) -> str:
    peer = f"rank {members[entry['root']]}" if entry["root"] >= 0 else "any rank"
    return f"send to {peer}" if entry["operation"] == "send" else f"recv from {peer}"


def _gap(track: str, lost: int, before: int) -> Span:
    return Span(track, f"{lost} more, not recorded", before, before)
