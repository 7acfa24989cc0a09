"""Nothing is recorded that was not asked for, and all that was."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from opensmd.timeline import recorder as module
from opensmd.timeline.frames import NOTHING_EXPECTED, Stretch
from opensmd.timeline.rank_file import read_rank_file
from opensmd.timeline.recorder import VARIABLE, Frame, Recorder, recorder
from tests.support.patience import PATIENCE


def test_without_the_variable_nothing_is_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_of_process", [])
    monkeypatch.delenv(VARIABLE, raising=False)
    assert recorder(0) is None


def test_a_process_has_one_recorder_whatever_rank_it_takes_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_of_process", [])
    monkeypatch.setenv(VARIABLE, str(tmp_path / "when"))
    first = recorder(1)
    assert first is not None and recorder(0) is first
    first.close()
    assert [path.name for path in (tmp_path / "when").iterdir()] == ["rank-1.events"]


def test_a_file_of_something_else_is_not_written_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_of_process", [])
    monkeypatch.setenv(VARIABLE, str(tmp_path))
    theirs = tmp_path / "rank-0.events"
    theirs.write_text('{"events": []}')
    with pytest.raises(ValueError, match=r"rank-0\.events was written by something else"):
        recorder(0)
    assert theirs.read_text() == '{"events": []}'
    Recorder(tmp_path, rank=1).close()
    Recorder(tmp_path, rank=1).close()  # of an earlier job


@pytest.mark.parametrize("inside", ["", "below"])
def test_a_folder_that_cannot_be_made_is_named_with_the_variable(inside: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=rf"{VARIABLE}='{tmp_path}/file.*cannot write to that folder"):
        Recorder(tmp_path / "file" / inside, rank=0)


def test_on_a_full_disk_the_timeline_ends_with_a_warning_and_the_job_goes_on(tmp_path: Path) -> None:
    writer = Recorder(tmp_path, rank=0)
    writer.paused = True
    with writer._lock:
        writer._file.close()
        writer._file = module._opened(Path("/dev/full"))
    writer.add_step(steps(2), NOTHING_EXPECTED)
    with pytest.warns(RuntimeWarning, match=r"timeline ends here: .*rank-0\.events .*No space left"):
        writer.close()


def steps(count: int) -> list[Stretch]:
    return [(index, "forward", 10 * index, 10 * index + 5) for index in range(count)]


def test_a_step_is_written_without_waiting_for_the_end(tmp_path: Path) -> None:
    """What a killed rank has done before its last quarter of a second is there."""
    writer = Recorder(tmp_path, rank=3)
    writer.add_step(steps(2), NOTHING_EXPECTED)
    deadline = time.monotonic() + PATIENCE
    while b"step" not in (tmp_path / "rank-3.events").read_bytes() and time.monotonic() < deadline:
        time.sleep(0.01)
    found = read_rank_file(tmp_path / "rank-3.events")
    assert (found.rank, len(found.spans), found.cut) == (3, 2, False)
    writer.close()
    assert read_rank_file(tmp_path / "rank-3.events") == found


def test_an_alarm_is_heard_before_the_pause_is_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PAUSE", 10 * PATIENCE)
    writer = Recorder(tmp_path, rank=0)
    asked = []

    def source() -> list[Frame]:
        asked.append(time.monotonic())
        return []

    writer.add_source(source)
    deadline = time.monotonic() + PATIENCE
    while not asked and time.monotonic() < deadline:
        os.write(writer.alarm, b"\0")
        time.sleep(0.01)
    assert asked
    writer.close()


def test_what_is_too_much_is_left_out_and_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST", 5)
    writer = Recorder(tmp_path, rank=0)
    writer.paused = True  # so that all is written at once, at the end
    for _ in range(4):
        writer.add_step(steps(2), NOTHING_EXPECTED)
    writer.close()
    found = read_rank_file(tmp_path / "rank-0.events")
    assert len(found.spans) == 4 and found.cut
    assert (tmp_path / "rank-0.events").read_bytes().count(b"cut") == 1


def test_a_paused_recorder_asks_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PAUSE", 10 * PATIENCE)
    writer = Recorder(tmp_path, rank=0)
    writer.paused = True
    asked: list[int] = []

    def source() -> list[Frame]:
        asked.append(1)
        return []

    writer.add_source(source)
    for _ in range(3):
        os.write(writer.alarm, b"\0")
    writer.close()
    assert asked == [1], "the end is not paused"
