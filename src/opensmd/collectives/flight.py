"""The flight record: what each rank did when, in one format for collectives, messages and the pipeline.

The core keeps a ring of every member's last operations in the arena, so any rank can read all of them, even
those of a rank that hangs or has died. ``write_group_trace`` makes a file for https://ui.perfetto.dev.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch.distributed as dist

from opensmd.collectives import _torch_internals
from opensmd.native import core

__all__ = ["GroupEvent", "group_events", "write_group_trace"]


@dataclass(frozen=True)
class GroupEvent:
    """One activity of a rank.

    Attributes:
        rank: who did it, counted in ``group``.
        track: its row in the timeline: "collectives", "messages", or another.
        name: a short name for the timeline, for example "all_reduce".
        start_ns, end_ns: CLOCK_MONOTONIC nanoseconds (one clock per host); an end of 0 means not finished.
        details: further information as text.
    """

    rank: int
    track: str
    name: str
    start_ns: int
    end_ns: int
    details: dict[str, Any] = field(default_factory=dict)


def group_events(group: dist.ProcessGroup | None = None) -> list[GroupEvent]:
    """Return the recorded events of every rank of ``group`` (default: the default group), oldest first.

    Raises:
        RuntimeError: the group is not served by shared memory and keeps no record.
    """
    shared = _torch_internals.shared_group(group)
    events = []
    for rank in range(shared.size()):
        events += [_event(rank, "collectives", entry) for entry in shared.record(rank)]
        events += [_event(rank, "messages", entry) for entry in shared.message_record(rank)]
    return sorted(events, key=lambda event: event.start_ns)


def _event(rank: int, track: str, entry: core.RecordEntry) -> GroupEvent:
    details: dict[str, Any] = {**entry}
    shown = {key: details[key] for key in ("sequence", "description", "bytes", "tag") if details[key] != ""}
    return GroupEvent(rank, track, entry["operation"], entry["start_ns"], entry["end_ns"], shown)


def write_group_trace(events: Iterable[GroupEvent], path: str | Path) -> None:
    """Write events as a Chrome trace: one process per rank, one thread per track; unfinished ones last on."""
    listed = list(events)
    latest = max((max(event.start_ns, event.end_ns) for event in listed), default=0)
    tracks = {track: number for number, track in enumerate(sorted({event.track for event in listed}))}
    trace: list[dict[str, Any]] = []
    for rank in sorted({event.rank for event in listed}):
        trace.append({"ph": "M", "name": "process_name", "pid": rank, "args": {"name": f"rank {rank}"}})
        for track, number in tracks.items():
            args = {"name": track}
            trace.append({"ph": "M", "name": "thread_name", "pid": rank, "tid": number, "args": args})
    for event in listed:
        end = event.end_ns or latest
        trace.append(
            {
                "ph": "X",
                "name": event.name if event.end_ns else f"{event.name} (not over)",
                "pid": event.rank,
                "tid": tracks[event.track],
                "ts": event.start_ns / 1000,
                "dur": max(end - event.start_ns, 0) / 1000,
                "args": event.details,
            }
        )
    Path(path).write_text(json.dumps({"traceEvents": trace, "displayTimeUnit": "ns"}))
