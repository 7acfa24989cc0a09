"""The settings of memory that smdrun gives to ranks, for what is timed here."""

from __future__ import annotations

import os
import sys

from opensmd.launch.allocator import keeping_memory

__all__ = ["with_kept_memory"]


def with_kept_memory(module: str) -> None:
    """Begins ``module`` again with these settings, unless they are there.

    Without them, some time goes into pages that were given back to the kernel after the step before.
    """
    settings = keeping_memory(os.environ)
    if settings:
        os.execve(sys.executable, [sys.executable, "-m", module, *sys.argv[1:]], os.environ | settings)
