"""The size of gradient buckets, as wrappers of models take it from scripts."""

from __future__ import annotations

import math

__all__ = ["require_bucket_size"]


def require_bucket_size(megabytes: object, wrapper: str, *, or_none: bool = False) -> None:
    """Refuse what torch's reducer would take for no limit, or not understand.

    Args:
        megabytes: the argument ``bucket_cap_mb`` of ``wrapper``.
        or_none: None stands for a default.

    Raises:
        ValueError: it is no positive number.
    """
    if or_none and megabytes is None:
        return
    number = isinstance(megabytes, int | float) and not isinstance(megabytes, bool)
    if not (number and 0 < megabytes < math.inf):  # type: ignore[operator]
        choice = " or None" * or_none
        raise ValueError(
            f"{wrapper}: bucket_cap_mb must be a positive number of MiB{choice}, got {megabytes!r}"
        )
