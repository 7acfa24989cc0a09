"""What a whole campaign leaves in shared memory, where names do not tell whose they are."""

from __future__ import annotations

import time
from pathlib import Path

from tests.support.patience import PATIENCE

__all__ = ["named_memory", "named_since"]

FOLDER = Path("/dev/shm")


def named_memory() -> set[str]:
    """Files of shared memory that this library or torch may have made."""
    return {path.name for path in FOLDER.glob("*") if path.name.startswith(("opensmd", "torch_"))}


def named_since(before: set[str]) -> list[str]:
    """Those that are new, and stay: other programs of the machine have such files for moments."""
    left = named_memory() - before
    deadline = time.monotonic() + PATIENCE / 2
    while left and time.monotonic() < deadline:
        time.sleep(0.1)
        left &= named_memory()
    return [f"/dev/shm/{name}" for name in sorted(left)]
