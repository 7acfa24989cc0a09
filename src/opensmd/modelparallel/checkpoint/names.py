"""File names of checkpoints; pure.

A partial checkpoint ``f`` is one file a rank of the replica: ``f_{mp_rank}``, as documented. Files named
``f_{pp_rank}_{tp_rank}``, and with a third number, as later versions wrote them, are found too.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

__all__ = ["partial_name", "parts_of", "pending_name", "pending_of", "pending_parts"]

_NUMBERS = (r"_(\d+)", r"_(\d+)_0", r"_(\d+)_0_0")


def partial_name(f: str, *, mp_rank: int, rdp_rank: int | None = None, suffix: str = "") -> str:
    """The file of one rank; with ``rdp_rank`` the name of three numbers (``v3=True``)."""
    return f"{f}_{mp_rank}{suffix}" if rdp_rank is None else f"{f}_{mp_rank}_0_{rdp_rank}{suffix}"


def pending_name(name: str, save: str) -> str:
    """What a file of this save is called until it is renamed."""
    return f".{name}.{save}.new"


def pending_of(name: str, present: Iterable[str]) -> list[str]:
    """Those of the file names ``present`` that are this file of any save, and wait to be renamed."""
    return [file for file in present if re.fullmatch(rf"\.{re.escape(name)}\.[0-9a-zA-Z]+\.new", file)]


def parts_of(name: str, present: Iterable[str], *, suffix: str = "") -> list[str]:
    """Those of the file names ``present`` that are parts 0, 1, ... of the checkpoint ``name``, in order.

    Of the three ways of naming, the first that has a part 0 counts.
    """
    present = list(present)
    for pattern in _NUMBERS:
        numbered = _numbered(name, pattern + re.escape(suffix), present)
        if 0 in numbered:
            return [numbered[i] for i in sorted(numbered)]
    return []


def pending_parts(name: str, save: str, present: Iterable[str], *, suffix: str = "") -> dict[int, str]:
    """Those of the file names ``present`` that are parts of this save and wait to be renamed, by number."""
    present = list(present)
    found: dict[int, str] = {}
    for pattern in _NUMBERS:
        found = _numbered(f".{name}", f"{pattern}{re.escape(suffix)}\\.{save}\\.new", present) | found
    return found


def _numbered(name: str, ending: str, present: list[str]) -> dict[int, str]:
    matches = (re.fullmatch(re.escape(name) + ending, file) for file in present)
    return {int(match[1]): match[0] for match in matches if match is not None}
