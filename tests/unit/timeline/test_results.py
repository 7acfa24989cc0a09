"""Results of a job take the place of an earlier one's."""

from __future__ import annotations

from pathlib import Path

import pytest

from opensmd.timeline.results import PAGE, TRACE, begin_timeline


def test_results_of_an_earlier_job_are_removed(tmp_path: Path) -> None:
    for name in ("rank-5.events", TRACE, PAGE, "mine.txt"):
        (tmp_path / name).write_text("old")
    assert begin_timeline(tmp_path) == tmp_path.resolve()
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]
    with pytest.raises(ValueError, match=r"--timeline .* cannot write there"):
        begin_timeline(tmp_path / "mine.txt")
