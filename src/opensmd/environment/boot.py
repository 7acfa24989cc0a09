"""What tells machines apart, and one start of a machine from the next."""

from __future__ import annotations

import socket
from pathlib import Path

__all__ = ["boot_id"]


def boot_id() -> str:
    """The same for all processes of this machine since it was started, as its monotonic clock is."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:  # no Linux, or a sandbox that hides it
        return socket.gethostname()
