"""Refusing a place in a group that would make a rank wait in vain."""

from __future__ import annotations

import multiprocessing
import os
from pathlib import Path

from opensmd.environment.variables import current_launch

__all__ = ["require_place"]


def require_place(rank: int, size: int) -> None:
    """Refuse a rank that a group of ``size`` does not have, and a child that joins in its parent's place.

    Raises:
        ValueError: the group has no such rank, or is empty.
        RuntimeError: this process is being spawned by that rank and is still importing its script.
    """
    if size < 1:
        raise ValueError(
            f"a world size of {size} leaves no rank: give at least 1 (WORLD_SIZE, or world_size)"
        )
    if not 0 <= rank < size:
        raise ValueError(
            f"rank {rank} cannot be one of {size}: ranks go from 0 to {size - 1}. RANK and WORLD_SIZE "
            "do not fit, or rank and world_size of init_process_group"
        )
    # multiprocessing, too, refuses what a script must not do again while a child imports it
    importing = getattr(multiprocessing.current_process(), "_inheriting", False)
    if importing and size > 1 and _parents_place() == (rank, size):
        raise RuntimeError(
            f"this process was spawned by rank {rank}, for example for a DataLoader with spawned workers, "
            "and imports its script again, which creates the process group outside of "
            "`if __name__ == '__main__':`. It would wait for the other ranks, which have met its parent. "
            "Create the group under that line, or fork the workers"
        )


def _parents_place() -> tuple[int, int] | None:
    """Return the rank and world size with which a launcher has started this process's parent."""
    try:
        text = Path(f"/proc/{os.getppid()}/environ").read_text(errors="replace")
    except OSError:
        return None
    pairs = (entry.partition("=") for entry in text.split("\0"))
    launch = current_launch({name: value for name, _, value in pairs})
    return None if launch is None else (launch.rank, launch.size)
