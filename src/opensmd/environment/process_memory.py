"""This process's private memory: its size, and returning freed parts to the system."""

from __future__ import annotations

import ctypes
from pathlib import Path

__all__ = ["anonymous_bytes", "give_back_freed"]


def anonymous_bytes() -> int:
    """Return the private bytes, without files and shared memory; 0 if the system does not say."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) << 10 for line in lines if line.startswith("RssAnon:")), 0)


def give_back_freed() -> bool:
    """Return what glibc keeps for later to the system; False if the C library cannot."""
    try:
        ctypes.CDLL(None).malloc_trim(0)
    except (OSError, AttributeError):
        return False
    return True
