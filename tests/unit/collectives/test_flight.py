"""The trace that the flight record is written as."""

from __future__ import annotations

import json
from pathlib import Path

from opensmd.collectives.flight import GroupEvent, write_group_trace


def test_a_chrome_trace_has_a_process_a_rank_and_shows_what_is_not_over(tmp_path: Path) -> None:
    events = [
        GroupEvent(0, "collectives", "all_reduce", 1000, 3000, {"bytes": 4}),
        GroupEvent(1, "pipeline", "forward", 2000, 0),
    ]
    write_group_trace(events, tmp_path / "trace.json")
    trace = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    spans = [one for one in trace if one["ph"] == "X"]
    assert [(span["pid"], span["ts"], span["dur"]) for span in spans] == [(0, 1.0, 2.0), (1, 2.0, 1.0)]
    assert spans[1]["name"] == "forward (not over)"
