"""Who else could have written what is to be loaded, by owners, modes and links."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from opensmd.environment.private_files import make_folder, open_own, who_else_can_change


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A folder that is this user's alone."""
    tmp_path.chmod(0o700)
    return tmp_path


def test_a_file_of_this_users_own_is_nobody_elses(home: Path) -> None:
    (home / "core.so").write_text("")
    assert who_else_can_change(home / "core.so") is None
    assert who_else_can_change(home / "not" / "there") is None


@pytest.mark.parametrize("mode", [0o666, 0o602])
def test_a_file_that_others_may_write_to_is_named_with_its_mode(home: Path, mode: int) -> None:
    file = home / "core.so"
    file.write_text("")
    file.chmod(mode)
    assert who_else_can_change(file) == f"other users may write to {file} (mode {mode:o})"


def test_folders_above_count_and_a_sticky_one_does_not(home: Path) -> None:
    folder = home / "shared" / "mine"
    folder.mkdir(parents=True)
    (home / "shared").chmod(0o777)
    assert "other users may write to" in (who_else_can_change(folder / "core.so") or "")
    (home / "shared").chmod(0o1777)  # as /tmp: others may add files, and cannot replace this one
    assert who_else_can_change(folder / "core.so") is None
    assert who_else_can_change(home / "shared") is not None  # what lies there may be anybody's


def test_a_link_is_followed_to_where_others_may_write(home: Path) -> None:
    (home / "open").mkdir()
    (home / "open").chmod(0o777)
    (home / "open" / "core").mkdir()
    (home / "link").symlink_to("open")
    assert who_else_can_change(home / "link") == f"{home / 'link'} is a link"
    assert (
        who_else_can_change(home / "link" / "core") == f"other users may write to {home / 'open'} (mode 777)"
    )


def test_the_folder_above_a_link_is_that_of_its_target(home: Path) -> None:
    (home / "deep" / "inner").mkdir(parents=True)
    (home / "link").symlink_to("deep/inner")
    (home / "deep" / "core.so").write_text("")
    (home / "deep" / "core.so").chmod(0o666)
    (home / "core.so").write_text("")
    assert f"write to {home / 'deep' / 'core.so'}" in (
        who_else_can_change(home / "link" / ".." / "core.so") or ""
    )


def test_links_in_a_circle_end(home: Path) -> None:
    (home / "one").symlink_to("other")
    (home / "other").symlink_to("one")
    with pytest.raises(OSError, match="too many links on the way to"):
        who_else_can_change(home / "one" / "core.so")


def test_folders_are_made_for_this_user_alone_whatever_the_umask(home: Path) -> None:
    before = os.umask(0)
    try:
        make_folder(home / "a" / "b")
    finally:
        os.umask(before)
    assert [(home / part).stat().st_mode & 0o777 for part in ("a", "a/b")] == [0o700, 0o700]


def test_only_a_file_is_opened_and_nothing_is_cut_off(home: Path) -> None:
    (home / "lock").write_text("kept")
    os.close(open_own(home / "lock"))
    assert (home / "lock").read_text() == "kept"
    os.close(open_own(home / "new"))
    assert (home / "new").stat().st_mode & 0o777 == 0o600
    (home / "link").symlink_to("lock")
    os.mkfifo(home / "pipe")
    for name in ("link", "pipe"):
        with pytest.raises(OSError):
            open_own(home / name)


def test_a_file_where_a_folder_should_be_is_said_before_anything_is_written(home: Path) -> None:
    (home / "file").write_text("")
    for folder in (home / "file", home / "file" / "below"):
        assert who_else_can_change(folder) is None
        with pytest.raises(FileExistsError, match=r"/file'$"):
            make_folder(folder)
