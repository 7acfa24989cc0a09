"""The file that names the newest checkpoint."""

from __future__ import annotations

from pathlib import Path

import pytest

from opensmd.modelparallel.checkpoint.newest import read_newest, write_newest
from opensmd.modelparallel.exceptions import SMPCheckpointError


def test_newest_is_a_line_of_text_that_comes_back(tmp_path: Path) -> None:
    (tmp_path / "step_2_partial").mkdir()
    write_newest(tmp_path, "step_2", partial=True)
    assert (tmp_path / "newest").read_text() == "step_2_partial\n"
    assert read_newest(tmp_path, partial=True) == "step_2"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["newest", "step_2_partial"]


def test_a_full_checkpoint_may_have_a_name_that_ends_like_a_partial_ones(tmp_path: Path) -> None:
    (tmp_path / "of_partial").write_bytes(b"a file")
    write_newest(tmp_path, "of_partial", partial=False)
    assert read_newest(tmp_path, partial=False) == "of_partial"


def test_the_other_kind_is_refused_by_its_name(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="has no file 'newest'"):
        read_newest(tmp_path, partial=True)
    (tmp_path / "step_2_partial").mkdir()
    write_newest(tmp_path, "step_2", partial=True)
    with pytest.raises(SMPCheckpointError, match=r"'step_2', is a partial one.*Load it with partial=True"):
        read_newest(tmp_path, partial=False)


@pytest.mark.parametrize("text", [b"", b"gone\n", b"\xff\xfe", b"x" * 9000])
def test_damage_is_said(text: bytes, tmp_path: Path) -> None:
    (tmp_path / "newest").write_bytes(text)
    with pytest.raises(SMPCheckpointError, match="newest is damaged"):
        read_newest(tmp_path, partial=True)
