"""Refusing a rank that does not fit the world size, which might wait for a rank 0 that does not exist."""

from __future__ import annotations

__all__ = ["require_place"]


def require_place(rank: int, size: int) -> None:
    """Refuse a rank that a group of ``size`` does not have.

    Raises:
        ValueError: the group has no such rank, or is empty.
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
