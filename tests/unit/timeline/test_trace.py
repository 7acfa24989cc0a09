"""The Chrome trace of a timeline."""

from __future__ import annotations

import json
from pathlib import Path

from opensmd.timeline.files import Timeline
from opensmd.timeline.span import COLLECTIVES, PIPELINE, Span
from opensmd.timeline.trace import lane_for, write_trace


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


def spans(*times: tuple[int, int]) -> list[Span]:
    return [Span(COLLECTIVES, "all_reduce", start, end) for start, end in times]


def test_spans_at_the_same_time_get_lanes_and_free_ones_are_used_again() -> None:
    ends = [0]
    lanes = [lane_for(span, ends) for span in spans((0, 10), (5, 30), (10, 12), (11, 13), (31, 40))]
    assert lanes == [0, 1, 0, 2, 0]
    assert ends == [40, 30, 13]


def test_events_of_one_thread_never_overlap(tmp_path: Path) -> None:
    write_trace(Timeline({0: spans((0, 100), (50, 150), (120, 130))}), tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    names = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert names == {0: COLLECTIVES, 1: COLLECTIVES}
    assert [event["tid"] for event in events if event["ph"] == "X"] == [0, 1, 0]
