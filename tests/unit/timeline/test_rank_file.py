"""What the frames of a rank's file mean."""

from __future__ import annotations

from pathlib import Path

import pytest

from opensmd.timeline.frames import (
    CALL,
    CUT,
    NOTHING_EXPECTED,
    begin_frame,
    calls_frame,
    expected_frame,
    group_frame,
    lost_frame,
    operation_frame,
    step_frame,
)
from opensmd.timeline.rank_file import RankFile, read_rank_file
from opensmd.timeline.span import COLLECTIVES, EXPECTED, MESSAGES, PIPELINE, Span

NAMES = [operation_frame(1, "all_reduce"), operation_frame(2, "send"), operation_frame(3, "recv_any_source")]


def read(folder: Path, *frames: bytes) -> RankFile:
    (folder / "rank-0.events").write_bytes(b"".join([begin_frame(0, "machine", 5), *frames]))
    return read_rank_file(folder / "rank-0.events")


def call(operation: int, *, group: int = 1, sequence: int = 0, peer: int = -1) -> bytes:
    return CALL.pack(10, 20, 4, sequence, group, peer, operation, 0)


def test_calls_are_collectives_of_a_group_or_messages_to_a_global_rank(tmp_path: Path) -> None:
    calls = call(1, sequence=8) + call(2, peer=1) + call(3, peer=0) + call(3)
    found = read(tmp_path, *NAMES, group_frame(1, "pair", [3, 5]), calls_frame(calls))
    assert found.spans == [
        Span(COLLECTIVES, "all_reduce", 10, 20, call="3.0/pair/8", bytes=4),
        Span(MESSAGES, "send to rank 5", 10, 20, bytes=4),
        Span(MESSAGES, "recv from rank 3", 10, 20, bytes=4),
        Span(MESSAGES, "recv", 10, 20, bytes=4),
    ]
    assert (found.rank, found.machine, found.wall_ns, found.cut) == (0, "machine", 5, False)


def test_a_name_that_comes_again_is_another_group(tmp_path: Path) -> None:
    groups = [group_frame(1, "0", [0, 1]), group_frame(2, "0", [0, 1]), group_frame(3, "0", [1, 0])]
    calls = calls_frame(b"".join(call(1, group=group, sequence=1) for group in (1, 2, 3)))
    spans = read(tmp_path, *NAMES, *groups, calls).spans
    assert [span.call for span in spans] == ["0.0/0/1", "0.1/0/1", "1.0/0/1"]


def test_a_collective_of_a_group_that_nobody_made_known_is_shown_and_waits_for_nobody(tmp_path: Path) -> None:
    (span,) = read(tmp_path, *NAMES, calls_frame(call(1, group=0))).spans
    assert (span.name, span.call) == ("all_reduce", "")


def test_what_is_lost_is_shown_where_it_was(tmp_path: Path) -> None:
    assert read(tmp_path, lost_frame(7, 99)).spans == [Span(COLLECTIVES, "7 more, not recorded", 99, 99)]
    assert read(tmp_path, CUT).cut


def test_a_step_is_shown_beside_what_its_plan_expects_in_the_time_that_it_worked(tmp_path: Path) -> None:
    parts = expected_frame(4, [(0, "forward", 0.0, 1.0), (0, "backward", 2.0, 5.0)])
    done = [(0, "forward", 100, 300), (-1, "wait", 300, 700), (0, "backward", 700, 900)]
    spans = read(tmp_path, parts, step_frame(4, done)).spans
    assert spans == [
        Span(PIPELINE, "forward", 100, 300, 0),
        Span(PIPELINE, "wait", 300, 700, -1),
        Span(PIPELINE, "backward", 700, 900, 0),
        Span(EXPECTED, "forward", 100, 200, 0),
        Span(EXPECTED, "backward", 300, 600, 0),
    ]
    assert len(read(tmp_path, step_frame(NOTHING_EXPECTED, done)).spans) == 3
    assert read(tmp_path, parts, step_frame(4, [])).spans == []


def test_half_a_frame_of_a_killed_rank_is_left_out(tmp_path: Path) -> None:
    step = step_frame(NOTHING_EXPECTED, [(0, "forward", 1, 2)])
    assert len(read(tmp_path, step, step[:-9]).spans) == 1
    assert len(read(tmp_path, step, step[:3]).spans) == 1


def test_other_files_are_refused(tmp_path: Path) -> None:
    (tmp_path / "rank-1.events").write_text("something else\n")
    with pytest.raises(ValueError, match=r"rank-1\.events is not a rank's part of a timeline"):
        read_rank_file(tmp_path / "rank-1.events")
    with pytest.raises(ValueError, match="not a rank's part"):
        read(tmp_path, b"pipeline\tforward\t1\t2\t0\t\t0\n")
