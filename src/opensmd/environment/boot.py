"""Identifying a machine and its current boot."""

from __future__ import annotations

import socket
from pathlib import Path

__all__ = ["boot_id"]


def boot_id() -> str:
    """Return an id of the current boot, the same for all processes that share the monotonic clock."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:  # not Linux, or a sandbox that hides it
        return socket.gethostname()
