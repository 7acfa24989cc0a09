"""Checking the size of gradient buckets that scripts give to model wrappers."""

from __future__ import annotations

import math

__all__ = ["require_bucket_size"]


def require_bucket_size(megabytes: object, wrapper: str, *, or_none: bool = False) -> None:
    """Refuse values that torch's reducer would take for no limit, or not understand.

    Args:
        megabytes: the argument ``bucket_cap_mb`` of ``wrapper``.
        or_none: whether None is allowed, for a default.

    Raises:
        ValueError: it is not a positive number.
    """
    if or_none and megabytes is None:
        return
    number = isinstance(megabytes, int | float) and not isinstance(megabytes, bool)
    if not (number and 0 < megabytes < math.inf):  # type: ignore[operator]
        choice = " or None" * or_none
        raise ValueError(
            f"{wrapper}: bucket_cap_mb must be a positive number of MiB{choice}, got {megabytes!r}"
        )
