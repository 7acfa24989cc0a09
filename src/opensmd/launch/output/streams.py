"""The launcher's standard streams: always open, byte for byte what ranks wrote, and never a reason to hang.

Daemons start programs with closed streams, readers of a pipe leave early, disks fill up. None of this may
stop the launcher, because ranks wait forever once nobody empties their pipes.
"""

from __future__ import annotations

import os
import select
import sys
from io import BufferedWriter, FileIO, TextIOWrapper
from types import NoneType
from typing import Any, TextIO

__all__ = ["patient", "prepare", "put"]

_STANDARD = 3  # descriptors 0, 1 and 2


class _Patient(BufferedWriter):
    """Waits for room also in a pipe or terminal that another process has made non-blocking.

    Its buffer knows what has been written whenever a signal interrupts: a raw stream in Python would not.
    """

    def write(self, data: Any, /) -> int:
        rest = memoryview(data)
        while rest:
            try:
                rest = rest[super().write(rest) :]
            except BlockingIOError as error:
                rest = rest[error.characters_written :]
                self._wait_for_room()
        return len(data)

    def flush(self) -> None:
        while True:
            try:
                return super().flush()
            except BlockingIOError:
                self._wait_for_room()

    def _wait_for_room(self) -> None:
        select.select([], [self], [])


def prepare() -> None:
    """Open closed streams before another file takes their numbers, and let every byte through."""
    while (opened := os.open(os.devnull, os.O_RDWR)) < _STANDARD:
        os.set_inheritable(opened, True)
    os.close(opened)
    for number, name in ((1, "stdout"), (2, "stderr")):
        if type(getattr(sys, name)) in (TextIOWrapper, NoneType):  # otherwise it is replaced, as in a test
            setattr(sys, name, patient(number))


def patient(number: int) -> TextIO:
    """Return a stream for a descriptor that takes every byte, and waits where there is no room."""
    binary = _Patient(FileIO(number, "w", closefd=False))
    return TextIOWrapper(binary, encoding="utf-8", errors="surrogateescape", line_buffering=True)


def put(out: TextIO, text: str) -> OSError | None:
    """Write ``text`` now; if that fails, return why and point ``out`` nowhere from then on."""
    try:
        out.write(text)
        out.flush()
    except OSError as error:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, out.fileno())
        os.close(nowhere)
        return error
    return None
