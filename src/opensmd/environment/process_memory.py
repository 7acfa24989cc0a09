"""Memory that is this process's own: how much it is, and giving back what has been freed of it."""

from __future__ import annotations

import ctypes
from pathlib import Path

__all__ = ["anonymous_bytes", "give_back_freed"]


def anonymous_bytes() -> int:
    """Bytes without files and what the process shares; 0 where the system does not tell."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) << 10 for line in lines if line.startswith("RssAnon:")), 0)


def give_back_freed() -> bool:
    """Give back what glibc keeps for later; False where the C library cannot."""
    try:
        ctypes.CDLL(None).malloc_trim(0)
    except (OSError, AttributeError):
        return False
    return True
