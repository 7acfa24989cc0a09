"""File names of checkpoints; pure.

A partial checkpoint ``f`` is one file a rank of the replica: ``f_{mp_rank}`` as seed 002 says. Files named
``f_{pp_rank}_{tp_rank}``, and with a third number, as later versions wrote them, are found too.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

__all__ = ["parts_of", "partial_name"]


def partial_name(f: str, *, mp_rank: int, rdp_rank: int | None = None, suffix: str = "") -> str:
    """The file of one rank; with ``rdp_rank`` the name of three numbers (``v3=True``)."""
    return f"{f}_{mp_rank}{suffix}" if rdp_rank is None else f"{f}_{mp_rank}_0_{rdp_rank}{suffix}"


def parts_of(name: str, present: Iterable[str], *, suffix: str = "") -> list[str]:
    """Those of the file names ``present`` that are parts 0, 1, ... of the checkpoint ``name``, in order.

    Of the three ways of naming, the first that has a part 0 counts.
    """
    for pattern in (r"_(\d+)", r"_(\d+)_0", r"_(\d+)_0_0"):
        numbered = {
            int(match[1]): each
            for each in present
            if (match := re.fullmatch(re.escape(name) + pattern + re.escape(suffix), each)) is not None
        }
        if 0 in numbered:
            return [numbered[i] for i in sorted(numbered)]
    return []
