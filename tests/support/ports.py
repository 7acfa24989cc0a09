"""TCP ports of 127.0.0.1 for tests, which nobody else is going to take."""

from __future__ import annotations

import fcntl
import os
import random
import socket
import struct
from contextlib import suppress

__all__ = ["free_port", "take_block"]

# Linux gives connections 32768 to 60999, and ranks under MPI meet at 20000 to 32767.
BLOCKS = range(10_000, 20_000, 500)
VARIABLE = "OPENSMD_TEST_PORTS"  # the first of the block, for all that a session starts

# How many ports were given, for this process and all that are forked from it. A file, because the kernel
# takes the lock of a file from a process that is killed.
_given = os.memfd_create("ports given")
os.pwrite(_given, struct.pack("I", random.SystemRandom().randrange(BLOCKS.step)), 0)


def take_block() -> None:
    """Give this process, and what it starts from now on, ports that no other session of tests has.

    Raises:
        RuntimeError: there are too many sessions.
    """
    for first in BLOCKS:
        holder = socket.socket(socket.AF_UNIX)
        try:
            holder.bind(
                f"\0opensmd-test-ports-{first}"
            )  # no file, and free again when its processes have ended
        except OSError:
            holder.close()
            continue
        holder.detach()  # open as long as this process
        os.environ[VARIABLE] = str(first)
        return
    raise RuntimeError(f"{len(BLOCKS)} sessions of tests run on this machine; there are no ports for another")


def free_port() -> int:
    """A port that was free a moment ago; a session and its forks give theirs in turn, none twice in a row."""
    first = int(os.environ.get(VARIABLE, BLOCKS.start))
    while True:
        port = first + _count() % BLOCKS.step
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


def _count() -> int:
    fcntl.lockf(_given, fcntl.LOCK_EX)
    try:
        (given,) = struct.unpack("I", os.pread(_given, 4, 0))
        os.pwrite(_given, struct.pack("I", given + 1), 0)
    finally:
        fcntl.lockf(_given, fcntl.LOCK_UN)
    return int(given)
