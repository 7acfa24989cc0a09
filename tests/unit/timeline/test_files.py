"""What ranks record, and how it is read onto one clock."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from opensmd.timeline.files import read_timeline
from opensmd.timeline.frames import CALL, NOTHING_EXPECTED, calls_frame, group_frame, operation_frame
from opensmd.timeline.recorder import Frame, Recorder
from opensmd.timeline.results import write_results
from opensmd.timeline.span import COLLECTIVES, PIPELINE, Span


def test_what_is_recorded_is_read_again_on_one_clock(tmp_path: Path) -> None:
    recorders = [Recorder(tmp_path, rank=rank) for rank in (0, 1)]
    begun = time.perf_counter_ns()
    call = CALL.pack(begun, begun + 500, 64, 1, 1, -1, 2, 0)
    new = [
        Frame(group_frame(1, "world", [0, 1]), 0),
        Frame(operation_frame(2, "all_reduce"), 0),
        Frame(calls_frame(call), 1),
    ]
    recorders[0].add_step([(7, "forward", begun + 1000, begun + 3000)], NOTHING_EXPECTED)
    recorders[1].add_source(lambda: [new.pop(0) for _ in range(len(new))])
    for writer in recorders:
        writer.close()
        writer.close()
    found = read_timeline(tmp_path)
    assert found == {
        0: [Span(PIPELINE, "forward", 1000, 3000, 7)],
        1: [Span(COLLECTIVES, "all_reduce", 0, 500, call="0.0/world/1", bytes=64)],
    }
    assert found.end_ns == 3000 and found.cut == []


def test_an_empty_folder_says_what_is_recorded(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no rank has left events"):
        write_results(tmp_path)
