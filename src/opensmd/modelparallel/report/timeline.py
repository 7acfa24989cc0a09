"""The pipeline's events as a Chrome trace (chrome://tracing, Perfetto)."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from opensmd.modelparallel.report.events import PipelineEvent

__all__ = ["write_pipeline_trace"]


def write_pipeline_trace(events: Sequence[PipelineEvent], path: str | Path) -> None:
    """Write one process per rank and one complete event per stretch, in microseconds from the first event."""
    start = min((event.start_ns for event in events), default=0)
    trace: list[dict[str, Any]] = [
        {"ph": "M", "name": "process_name", "pid": rank, "tid": 0, "args": {"name": f"pipeline rank {rank}"}}
        for rank in sorted({event.rank for event in events})
    ]
    trace.extend(
        {
            "ph": "X",
            "name": event.kind if event.microbatch < 0 else f"{event.kind} {event.microbatch}",
            "cat": event.kind,
            "pid": event.rank,
            "tid": 0,
            "ts": (event.start_ns - start) / 1e3,
            "dur": (event.end_ns - event.start_ns) / 1e3,
            "args": {"microbatch": event.microbatch} | ({"to": event.target} if event.target >= 0 else {}),
        }
        for event in events
    )
    Path(path).write_text(json.dumps({"traceEvents": trace, "displayTimeUnit": "ms"}))
