"""The timeline as a Chrome trace, for https://ui.perfetto.dev."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from opensmd.timeline.files import Timeline
from opensmd.timeline.shares import last_entries, waits_until
from opensmd.timeline.span import PIPELINE, Span

__all__ = ["WRITER", "lane_for", "write_trace"]

WRITER = {"otherData": {"writer": "opensmd"}}  # first in the file, to identify it


def write_trace(timeline: Timeline, path: Path) -> None:
    """Write one process per rank and one thread per track, or more if spans of a track overlap.

    Waiting is an event inside the waiting collective.
    """
    last = last_entries(timeline)
    tracks = sorted({span.track for spans in timeline.values() for span in spans})
    events: list[dict[str, Any]] = []
    for rank, spans in timeline.items():
        events.append(_name("process_name", rank, 0, f"rank {rank}"))
        lanes: dict[str, list[int]] = {track: [0] for track in tracks}
        for span in spans:
            thread = len(tracks) * lane_for(span, lanes[span.track]) + tracks.index(span.track)
            events += _events(span, rank, thread, last)
        for number, track in enumerate(tracks):
            threads = range(number, len(tracks) * len(lanes[track]), len(tracks))
            events += [_name("thread_name", rank, thread, track) for thread in threads]
    content = {**WRITER, "traceEvents": events, "displayTimeUnit": "ms"}
    path.write_text(json.dumps(content), encoding="utf-8")


def lane_for(span: Span, ends: list[int]) -> int:
    """Return the first lane that is free when ``span`` starts; note in ``ends`` how long it is taken."""
    free = next((lane for lane, end in enumerate(ends) if end <= span.start_ns), len(ends))
    ends[free:] = [span.end_ns, *ends[free + 1 :]]
    return free


def _events(span: Span, rank: int, thread: int, last: dict[str, tuple[int, int]]) -> Iterator[dict[str, Any]]:
    name = span.name if span.microbatch < 0 else f"{span.name} {span.microbatch}"
    details = {"microbatch": span.microbatch} if span.track == PIPELINE else {"bytes": span.bytes}
    yield _complete(name, rank, thread, span.start_ns, span.end_ns, details)
    if span.call:
        until, who = waits_until(span, last), last[span.call][1]
        if until > span.start_ns:
            yield _complete(f"waiting for rank {who}", rank, thread, span.start_ns, until, {})


def _complete(
    name: str, rank: int, thread: int, start: int, end: int, args: dict[str, Any]
) -> dict[str, Any]:
    times = {"ts": start / 1000, "dur": (end - start) / 1000}
    return {"ph": "X", "name": name, "pid": rank, "tid": thread, **times, "args": args}


def _name(kind: str, rank: int, thread: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": rank, "tid": thread, "args": {"name": name}}
