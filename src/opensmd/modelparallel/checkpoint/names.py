"""File names of checkpoints; pure.

A partial checkpoint ``f`` is one file a rank of the replica: ``f_{mp_rank}``, as documented, and with tensor
parallelism ``f_{pp_rank}_{tp_rank}``. Without it, files of two and three numbers, as later versions wrote
them, are found too.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

__all__ = ["partial_name", "parts_of", "pending_name", "pending_of", "pending_parts"]

# With the part's number among tensor-parallel ranks last, 0 where there is one.
_NUMBERS = (r"_(\d+)()", r"_(\d+)_(0)", r"_(\d+)_(0)_0")
_SHARED = (r"_(\d+)_(\d+)", r"_(\d+)_(\d+)_0")


def partial_name(
    f: str,
    *,
    pp_rank: int,
    tp_rank: int | None = None,
    rdp_rank: int | None = None,
    suffix: str = "",
) -> str:
    """The file of one rank.

    Args:
        tp_rank: None where tensors are not shared.
        rdp_rank: for the name of three numbers (``v3=True``).
    """
    if rdp_rank is not None:
        return f"{f}_{pp_rank}_{tp_rank or 0}_{rdp_rank}{suffix}"
    return f"{f}_{pp_rank}{suffix}" if tp_rank is None else f"{f}_{pp_rank}_{tp_rank}{suffix}"


def pending_name(name: str, save: str) -> str:
    """What a file of this save is called until it is renamed."""
    return f".{name}.{save}.new"


def pending_of(name: str, present: Iterable[str]) -> list[str]:
    """Those of the file names ``present`` that are this file of any save, and wait to be renamed."""
    return [file for file in present if re.fullmatch(rf"\.{re.escape(name)}\.[0-9a-zA-Z]+\.new", file)]


def parts_of(name: str, present: Iterable[str], *, suffix: str = "", tensor: int = 1) -> list[str]:
    """Those of the file names ``present`` that are parts 0, 1, ... of the checkpoint ``name``, in order.

    Of the ways of naming, the first that has a part 0 counts. ``tensor`` ranks share each tensor; a
    checkpoint of ranks that shared none is found, too.
    """
    present = list(present)
    for pattern in (*_SHARED, *_NUMBERS) if tensor > 1 else _NUMBERS:
        numbered = _numbered(name, pattern + re.escape(suffix), present, tensor)
        if 0 in numbered:
            return [numbered[i] for i in sorted(numbered)]
    return []


def pending_parts(
    name: str, save: str, present: Iterable[str], *, suffix: str = "", tensor: int = 1
) -> dict[int, str]:
    """Those of the file names ``present`` that are parts of this save and wait to be renamed, by number."""
    present = list(present)
    found: dict[int, str] = {}
    for pattern in _SHARED if tensor > 1 else _NUMBERS:
        ending = f"{pattern}{re.escape(suffix)}\\.{save}\\.new"
        found = _numbered(f".{name}", ending, present, tensor) | found
    return found


def _numbered(name: str, ending: str, present: list[str], tensor: int) -> dict[int, str]:
    matches = (re.fullmatch(re.escape(name) + ending, file) for file in present)
    found = [match for match in matches if match is not None]
    if any(match[2] and int(match[2]) >= tensor for match in found):
        return {}  # more ranks shared the tensors
    return {int(match[1]) * (tensor if match[2] else 1) + int(match[2] or 0): match[0] for match in found}
