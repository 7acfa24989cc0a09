"""Results of a job take the place of an earlier one's, and of nothing else."""

from __future__ import annotations

from pathlib import Path

import pytest

from opensmd.timeline.frames import NOTHING_EXPECTED
from opensmd.timeline.recorder import Recorder
from opensmd.timeline.results import PAGE, TRACE, begin_timeline, write_results


def record(folder: Path) -> None:
    recorder = Recorder(folder, rank=0)
    recorder.add_step([(0, "forward", 1, 2)], NOTHING_EXPECTED)
    recorder.close()


def test_results_of_an_earlier_job_are_removed(tmp_path: Path) -> None:
    record(tmp_path)
    write_results(tmp_path)
    write_results(tmp_path)
    (tmp_path / "rank-5.events").touch()  # of a rank that was killed before it wrote
    (tmp_path / "mine.txt").write_text("mine")
    assert len(list(tmp_path.iterdir())) == 5
    assert begin_timeline(tmp_path) == tmp_path.resolve()
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]
    with pytest.raises(ValueError, match=r"--timeline .* cannot write there"):
        begin_timeline(tmp_path / "mine.txt")


@pytest.mark.parametrize("name", [TRACE, PAGE, "rank-0.events"])
def test_files_of_other_programs_are_neither_removed_nor_written_over(tmp_path: Path, name: str) -> None:
    record(tmp_path)
    (tmp_path / name).write_text('{"schemaVersion": 1, "traceEvents": []}')  # as torch.profiler writes it
    with pytest.raises(ValueError, match=rf"{name} was written by something else"):
        begin_timeline(tmp_path)
    assert (tmp_path / "rank-0.events").exists(), "nothing is removed before all have been looked at"
    with pytest.raises(ValueError, match=name):
        write_results(tmp_path)
    assert "schemaVersion" in (tmp_path / name).read_text()
