"""Whether processes of this host can reach each other over its loopback, before they wait in vain.

torch's stores retry until their timeout, ignoring signals, and do not mention the interface.
"""

from __future__ import annotations

import errno
import socket

__all__ = ["LOOPBACK", "LOOPBACK_NAMES", "why_loopback_is_down"]

LOOPBACK = "127.0.0.1"
LOOPBACK_NAMES = (LOOPBACK, "localhost")
_NO_WAY = (errno.ENETUNREACH, errno.EADDRNOTAVAIL, errno.ENETDOWN, errno.EHOSTUNREACH)


def why_loopback_is_down() -> str | None:
    """Return what is wrong and what to do about it; None if the loopback works, or that is unknown."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((LOOPBACK, 9))  # sends nothing
    except OSError as error:
        if error.errno not in _NO_WAY:
            return None
        return (
            f"ranks of one host meet at {LOOPBACK}, which cannot be reached here ({error.strerror}): the "
            "loopback interface of this network namespace is down, or lacks that address. Bring it up with "
            "`ip link set lo up`."
        )
    return None
