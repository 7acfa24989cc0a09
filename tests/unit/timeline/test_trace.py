"""The Chrome trace of a timeline."""

from __future__ import annotations

import json
from pathlib import Path

from opensmd.timeline.span import COLLECTIVES, PIPELINE, Span
from opensmd.timeline.trace import write_trace


def test_a_rank_waits_inside_its_collective_for_the_last_one(tmp_path: Path) -> None:
    timeline = {
        0: [
            Span(PIPELINE, "forward", 0, 2000, microbatch=3),
            Span(COLLECTIVES, "all_reduce", 2000, 9000, call="all_reduce 1", bytes=64),
        ],
        1: [Span(COLLECTIVES, "all_reduce", 7000, 9000, call="all_reduce 1", bytes=64)],
    }
    write_trace(timeline, tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    shown = [
        (event["pid"], event["name"], event["ts"], event["dur"], event["args"])
        for event in events
        if event["ph"] == "X"
    ]
    assert shown == [
        (0, "forward 3", 0, 2, {"microbatch": 3}),
        (0, "all_reduce", 2, 7, {"bytes": 64}),
        (0, "waiting for rank 1", 2, 5, {}),
        (1, "all_reduce", 7, 2, {"bytes": 64}),
    ]
    names = {(event["pid"], event["args"]["name"]) for event in events if event["ph"] == "M"}
    assert names == {(rank, name) for rank in (0, 1) for name in (f"rank {rank}", PIPELINE, COLLECTIVES)}
