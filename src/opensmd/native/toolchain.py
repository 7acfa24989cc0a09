"""Choosing the C++ compiler: the requested one, or else the first that is found."""

from __future__ import annotations

import shlex
import shutil
from dataclasses import dataclass

from opensmd.native.compilers import Compilers
from opensmd.native.errors import BuildError

__all__ = ["Toolchain", "find_compiler"]

NAMES = ("c++", "g++", "clang++")


@dataclass(frozen=True)
class Toolchain:
    """A C++ compiler: the words of its command, and what it calls itself."""

    command: tuple[str, ...]
    version: str

    @property
    def key(self) -> str:
        """Distinguishes its results from those of other compilers."""
        return "\0".join([self.version, *self.command[1:]])


def find_compiler(command: str | None) -> Toolchain | None:
    """Return the compiler in ``CXX`` (words as in a shell), or the first on PATH; None if there is none.

    Raises:
        BuildError: ``CXX`` is not a compiler.
    """
    if command is not None:
        return _asked(command)
    for name in NAMES:
        path = shutil.which(name)
        version = _version((path,)) if path is not None else None
        if path is not None and version is not None:
            return Toolchain((path,), version)
    return None


def _asked(text: str) -> Toolchain:
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise BuildError(f"CXX={text} cannot be read as in a shell: {error}. {_what_to_do()}") from None
    path = shutil.which(words[0]) if words else None
    if path is None:
        raise BuildError(f"CXX={text}: there is no such program. {_what_to_do()}")
    command = (path, *words[1:])
    version = _version(command)
    if version is None:
        raise BuildError(f"CXX={text} is not a C++ compiler: `{text} --version` failed. {_what_to_do()}")
    return Toolchain(command, version)


def _version(command: tuple[str, ...]) -> str | None:
    with Compilers() as compilers:
        done = compilers.run([*command, "--version"])
    return done.stdout.strip() if done.returncode == 0 else None


def _what_to_do() -> str:
    return f"Set CXX to the path of one, or unset it to use the first of {', '.join(NAMES)} on PATH."
