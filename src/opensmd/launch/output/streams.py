"""The launcher's standard streams: always open, byte for byte what ranks wrote, and never a reason to hang.

Daemons start programs with closed streams, readers of a pipe leave early, disks fill up. None of this may
stop the launcher, because ranks wait forever once nobody empties their pipes.
"""

from __future__ import annotations

import os
import sys
from io import TextIOWrapper
from typing import TextIO

__all__ = ["prepare", "put"]

_STANDARD = 3  # descriptors 0, 1 and 2


def prepare() -> None:
    """Open closed streams before another file takes their numbers, and let every byte through."""
    while (opened := os.open(os.devnull, os.O_RDWR)) < _STANDARD:
        os.set_inheritable(opened, True)
    os.close(opened)
    for number, name in ((1, "stdout"), (2, "stderr")):
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(number, "w", closefd=False))
        stream = getattr(sys, name)
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(encoding="utf-8", errors="surrogateescape")


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
