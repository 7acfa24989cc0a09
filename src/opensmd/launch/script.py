"""Checking what ranks will run before anything starts, so that a mistake gives one line, not one per rank."""

from __future__ import annotations

import os
import shutil
import sys
from importlib.machinery import PathFinder
from pathlib import Path

__all__ = ["check_module", "check_script", "find_program"]

_SHELL_SUFFIXES = {".sh", ".bash", ".zsh", ".ksh"}
_BINARY = b"\x7fELF"


def check_script(script: str) -> None:
    """Check that Python can run ``script``: a file, or a folder or archive with a ``__main__``.

    Raises:
        ValueError: it does not exist, cannot be read, or needs something other than Python to run it.
    """
    try:
        _check_script(script)
    except OSError as error:
        raise ValueError(f"cannot read the script {script!r}: {error.strerror}") from error


def _check_script(script: str) -> None:
    path = Path(script)
    if script == "-" or path.is_fifo() or path.is_char_device():
        raise ValueError(
            f"cannot run {script!r}: what comes through standard input or a pipe can be read once, and every "
            "rank has to read the script. Save it in a file and give its name"
        )
    if not path.exists():
        raise ValueError(f"there is no script {script!r} in {Path.cwd()}")
    if path.is_dir():
        if not (path / "__main__.py").exists():
            raise ValueError(f"{script!r} is a folder without a __main__.py")
        return
    with path.open("rb") as file:
        first = file.readline(200)
    kind = _not_python(path, first)
    if kind is not None:
        raise ValueError(
            f"{script!r} is {kind}, and ranks run Python: add --no-python to run it in each rank as it is, "
            "or call smdrun with the Python script that it starts"
        )


def _not_python(path: Path, first: bytes) -> str | None:
    """Return what a file is if it is not a Python script, or None."""
    if first.startswith(_BINARY):
        return "a program"
    if path.suffix == ".py":
        return None
    if first.startswith(b"#!"):
        if b"python" in first:
            return None
        return f"a script for {first[2:].decode(errors='replace').strip()}"
    return "a shell script" if path.suffix in _SHELL_SUFFIXES else None


def check_module(name: str) -> None:
    """Check that there is a module to run with ``-m``, without importing it.

    Raises:
        ValueError: there is none, or the name is that of its file, which Python would only report after
            running it.
    """
    top = name.partition(".")[0]
    spec = PathFinder.find_spec(top, [str(Path.cwd()), *sys.path])
    if name == f"{top}.py" and spec is not None and spec.submodule_search_locations is None:
        raise ValueError(f"{name!r} is a file, and -m takes a module: write -m {top}, or leave -m out")
    if spec is None and top not in sys.builtin_module_names:
        raise ValueError(f"there is no module {top!r} in {Path.cwd()} or among the installed ones")


def find_program(name: str) -> str:
    """Return the path of a program to run with ``--no-python``, from PATH or relative to the current folder.

    Raises:
        ValueError: there is none that can be executed.
    """
    on_path = shutil.which(name)
    if on_path is not None:
        return on_path
    if not Path(name).is_file():
        raise ValueError(f"there is no program {name!r}, neither in {Path.cwd()} nor on PATH")
    if not os.access(name, os.X_OK):
        raise ValueError(
            f"{name!r} cannot be executed: run chmod +x {name}, or start it through its interpreter"
        )
    return str(Path(name).absolute())
