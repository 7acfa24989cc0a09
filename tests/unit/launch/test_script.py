"""What smdrun is asked to run, looked at before ranks start."""

from __future__ import annotations

import os
import shutil
import zipfile
from pathlib import Path

import pytest

from opensmd.launch.script import check_module, check_script, find_program


@pytest.mark.parametrize(
    ("name", "first"),
    [
        ("train.py", b"print(1)\n"),
        ("train", b"#!/usr/bin/env python3\n"),
        ("train", b"print(1)\n"),  # no ending and no first line: Python may try
        ("empty.py", b""),
        ("latin.py", b"# \xff\n"),
    ],
)
def test_what_python_can_run_is_let_through(tmp_path: Path, name: str, first: bytes) -> None:
    (tmp_path / name).write_bytes(first)
    check_script(str(tmp_path / name))


def test_a_script_that_can_be_read_only_once_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for script in ("-", str(tmp_path / "pipe"), "/dev/null"):
        with pytest.raises(ValueError, match=f"cannot run '{script}': .*Save it in a file"):
            check_script(script)


def test_folders_and_archives_need_a_main_file(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"is a folder without a __main__\.py"):
        check_script(str(tmp_path))
    (tmp_path / "__main__.py").touch()
    check_script(str(tmp_path))
    with zipfile.ZipFile(tmp_path / "train.pyz", "w") as archive:
        archive.write(tmp_path / "__main__.py", "__main__.py")
    check_script(str(tmp_path / "train.pyz"))


@pytest.mark.parametrize(
    ("name", "first", "kind"),
    [
        ("train.sh", b"python train.py\n", "a shell script"),
        ("train", b"#!/bin/sh -e\nexec true\n", "a script for /bin/sh -e"),
        ("train", b"\x7fELF\x02\x01", "a program"),
    ],
)
def test_what_something_else_runs_is_refused_with_the_option_for_it(
    tmp_path: Path, name: str, first: bytes, kind: str
) -> None:
    (tmp_path / name).write_bytes(first)
    with pytest.raises(ValueError, match=f"is {kind}, and ranks run Python: add --no-python"):
        check_script(str(tmp_path / name))


def test_a_name_that_no_file_can_have_is_said_like_a_file_that_cannot_be_read() -> None:
    with pytest.raises(ValueError, match=r"cannot read the script 'x+': File name too long"):
        check_script("x" * 300)


def test_what_is_not_there_is_said_with_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=rf"there is no script 'train\.py' in {tmp_path}"):
        check_script("train.py")
    with pytest.raises(ValueError, match=rf"there is no module 'trainers' in {tmp_path}"):
        check_module("trainers.first")
    with pytest.raises(ValueError, match=rf"there is no program 'trainer', neither in {tmp_path}"):
        find_program("trainer")


def test_modules_here_installed_and_built_in_are_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "trainers").mkdir()
    (tmp_path / "trainers" / "__init__.py").write_text("raise RuntimeError('nothing is imported')")
    for name in ("trainers.first", "torch", "sys"):
        check_module(name)


def test_a_file_is_no_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("")
    with pytest.raises(ValueError, match=r"'train\.py' is a file, and -m takes a module: write -m train, or"):
        check_module("train.py")


def test_a_program_is_found_here_or_on_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert find_program("sh") == shutil.which("sh")
    (tmp_path / "train.sh").write_text("#!/bin/sh\n")
    with pytest.raises(ValueError, match=r"cannot be executed: run chmod \+x train\.sh"):
        find_program("train.sh")
    (tmp_path / "train.sh").chmod(0o700)
    assert find_program("train.sh") == str(tmp_path / "train.sh")
