"""Which compiler is taken: with programs that say what a test wants them to say."""

from __future__ import annotations

from pathlib import Path

import pytest

from opensmd.native.errors import BuildError
from opensmd.native.toolchain import Toolchain, find_compiler


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PATH", str(tmp_path))
    return tmp_path


def program(path: Path, script: str) -> str:
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return str(path)


def test_the_first_on_path_that_says_its_version_is_taken(folder: Path) -> None:
    program(folder / "c++", "exit 1")  # a link to a compiler that has been removed
    path = program(folder / "g++", "echo g++ 14")
    program(folder / "clang++", "echo clang 19")
    assert find_compiler(None) == Toolchain((path,), "g++ 14")


def test_without_any_there_is_none(folder: Path) -> None:
    assert find_compiler(None) is None


def test_the_one_asked_for_is_taken_with_its_arguments(folder: Path) -> None:
    program(folder / "g++", "echo g++ 14")
    path = program(folder / "ccache", 'echo "$*"')
    assert find_compiler("ccache 'my g++' -m64") == Toolchain(
        (path, "my g++", "-m64"), "my g++ -m64 --version"
    )


@pytest.mark.parametrize(("asked", "said"), [("nowhere", "no such program"), ("", "no such program")])
def test_another_one_is_not_taken_in_its_place(folder: Path, asked: str, said: str) -> None:
    program(folder / "g++", "echo g++ 14")
    with pytest.raises(BuildError, match=rf"CXX={asked}: there is {said}.*Set CXX"):
        find_compiler(asked)


def test_words_that_no_shell_would_read_are_refused(folder: Path) -> None:
    program(folder / "g++", "echo g++ 14")
    with pytest.raises(BuildError, match=r"CXX=g\+\+ 'a cannot be read as in a shell.*Set CXX"):
        find_compiler("g++ 'a")


def test_a_program_that_is_no_compiler_is_refused(folder: Path) -> None:
    program(folder / "false", "exit 3")
    with pytest.raises(BuildError, match="`false --version` failed"):
        find_compiler("false")


def test_results_of_two_versions_or_with_other_arguments_are_not_mixed_up() -> None:
    keys = {
        Toolchain(command, version).key for command in (("g++",), ("g++", "-m32")) for version in ("13", "14")
    }
    assert len(keys) == 4
    assert Toolchain(("/usr/bin/g++",), "14").key == Toolchain(("/opt/bin/g++",), "14").key
