"""What ranks record, and how it is read onto one clock."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from opensmd.timeline.files import read_timeline
from opensmd.timeline.recorder import Recorder
from opensmd.timeline.results import write_results
from opensmd.timeline.span import COLLECTIVES, PIPELINE, Span


def collective(start: int, end: int, call: str = "world/0/1") -> Span:
    return Span(COLLECTIVES, "all_reduce", start, end, call=call, bytes=64)


def test_what_is_recorded_is_read_again_on_one_clock(tmp_path: Path) -> None:
    recorders = [Recorder(tmp_path, rank=rank) for rank in (0, 1)]
    begun = time.perf_counter_ns()
    new = [collective(begun, begun + 500)]
    recorders[0].add([Span(PIPELINE, "forward", begun + 1000, begun + 3000, 7)])
    recorders[1].add_source(lambda: [new.pop()] if new else [])
    for writer in recorders:
        writer.close()
        writer.close()
    found = read_timeline(tmp_path)
    assert found == {
        0: [Span(PIPELINE, "forward", 1000, 3000, 7)],
        1: [collective(0, 500)],
    }
    assert found.end_ns == 3000


def test_half_a_line_of_a_killed_rank_is_left_out(tmp_path: Path) -> None:
    (tmp_path / "rank-0.tsv").write_text("0\thost\t5\npipeline\tforward\t1\t2\t0\t\t0\npipeline\tforw")
    assert len(read_timeline(tmp_path)[0]) == 1
    (tmp_path / "rank-1.tsv").write_text("something else\n")
    with pytest.raises(ValueError, match=r"rank-1\.tsv is not a rank's part of a timeline"):
        read_timeline(tmp_path)


def test_an_empty_folder_says_what_is_recorded(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no rank has left events"):
        write_results(tmp_path)
