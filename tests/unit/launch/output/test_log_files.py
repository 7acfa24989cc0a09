"""What a rank says goes into a file of its own, and never over what was there before."""

from __future__ import annotations

from pathlib import Path

import pytest

from opensmd.launch.output.log_files import LogFiles


def say(folder: Path, text: bytes) -> None:
    files = LogFiles(folder)
    files.write(0, text)
    files.write(0, b"!")
    files.close()


def test_files_that_are_there_are_kept_with_a_number(tmp_path: Path) -> None:
    (tmp_path / "rank-0.log").write_text("of somebody else")
    (tmp_path / "rank-1.log").write_text("of a rank that this job has not")
    for text in (b"first", b"second"):
        say(tmp_path, text)
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {
        "rank-0.log": "second!",
        "rank-0.log.1": "of somebody else",
        "rank-0.log.2": "first!",
        "rank-1.log": "of a rank that this job has not",
    }


def test_what_cannot_be_written_is_told_once(tmp_path: Path) -> None:
    files = LogFiles(tmp_path / "missing")
    with pytest.raises(OSError):
        files.write(0, b"lost")
    files.write(0, b"lost")
