"""Has the kernel keep this process's memory in large pages, when it is imported.

The fork server imports this last. Half of what a fork costs that does nothing is the table of the server's
pages, which is copied at its start and taken apart at its end; of large pages it has hardly an entry. A fork
still copies small pages, those that it writes to. A kernel that cannot, or has no large page to spare, leaves
all as it was.
"""

from __future__ import annotations

import ctypes
from pathlib import Path

__all__: list[str] = []

COLLAPSE = 25  # MADV_COLLAPSE, since Linux 6.1
LARGE = 2 << 20  # bytes


def collapse() -> None:
    """All of the process's own memory but what lies at the ends of its mappings."""
    libc = ctypes.CDLL(None)
    for line in Path("/proc/self/maps").read_text().splitlines():
        bounds, access, _, _, file = line.split()[:5]
        if access != "rw-p" or file != "0":
            continue
        first, last = (int(bound, 16) for bound in bounds.split("-"))
        for address in range(-(-first // LARGE) * LARGE, last // LARGE * LARGE, LARGE):
            libc.madvise(ctypes.c_void_p(address), ctypes.c_size_t(LARGE), COLLAPSE)


collapse()
