"""A file is written over only by what has written it."""

from __future__ import annotations

from pathlib import Path

import pytest

from opensmd.timeline.own_files import require_own


def test_a_file_shows_at_its_top_whose_it_is(tmp_path: Path) -> None:
    path = tmp_path / "file"
    for ours in (b"", b"begin\t0\n", b"<!-- begin\t -->" + bytes(10_000)):
        path.write_bytes(ours)
        require_own(path, b"begin\t")
    for other in (b"{}", bytes(10_000) + b"begin\t"):
        path.write_bytes(other)
        with pytest.raises(ValueError, match="file was written by something else"):
            require_own(path, b"begin\t")
