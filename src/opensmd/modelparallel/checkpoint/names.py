"""File names of checkpoints; pure.

A partial checkpoint ``f`` is one file per rank of the replica: ``f_{mp_rank}``, as documented, or with tensor
parallelism ``f_{pp_rank}_{tp_rank}``. Without tensor parallelism, files with two and three numbers, as later
versions wrote them, are also found. The names in a set of files show how many ranks shared each tensor.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

__all__ = ["PartName", "partial_name", "parts_of", "pending_name", "pending_of", "ranks_sharing"]


@dataclass(frozen=True, kw_only=True)
class PartName:
    """The name of a file that is a part of a partial checkpoint.

    Attributes:
        file: the name.
        numbers: how many numbers it has.
        stage: the first of them.
        tensor: the second, 0 if there is none.
        replica: the third; None if there is none.
        save: if the file waits to be renamed, the save it belongs to.
    """

    file: str
    numbers: int
    stage: int
    tensor: int
    replica: int | None = None
    save: str | None = None


def partial_name(
    f: str,
    *,
    pp_rank: int,
    tp_rank: int | None = None,
    rdp_rank: int | None = None,
    suffix: str = "",
) -> str:
    """Return the file name of one rank.

    Args:
        tp_rank: None if tensors are not shared.
        rdp_rank: for names with three numbers (``v3=True``).
    """
    if rdp_rank is not None:
        return f"{f}_{pp_rank}_{tp_rank or 0}_{rdp_rank}{suffix}"
    return f"{f}_{pp_rank}{suffix}" if tp_rank is None else f"{f}_{pp_rank}_{tp_rank}{suffix}"


def pending_name(name: str, save: str) -> str:
    """Return the name that a file of this save has until it is renamed."""
    return f".{name}.{save}.new"


def pending_of(name: str, present: Iterable[str]) -> list[str]:
    """Select from ``present`` the names that this file, of any save, has until it is renamed."""
    return [file for file in present if re.fullmatch(rf"\.{re.escape(name)}\.[0-9a-zA-Z]+\.new", file)]


def parts_of(name: str, present: Iterable[str], *, suffix: str = "", replica: int = 0) -> list[PartName]:
    """Select from ``present`` the parts of the checkpoint ``name``, including those not renamed yet.

    Of names with three numbers, take those of ``replica``, or of the first one if that has saved nothing.
    """
    numbers = r"_(\d+)(?:_(\d+)(?:_(\d+))?)?"
    own = re.compile(rf"{re.escape(name)}{numbers}{re.escape(suffix)}()")
    waiting = re.compile(rf"\.{re.escape(name)}{numbers}{re.escape(suffix)}\.([0-9a-zA-Z]+)\.new")
    found = []
    for file in sorted(present):
        match = own.fullmatch(file) or waiting.fullmatch(file)
        if match is not None:
            stage, tensor, third, save = match.groups()
            found.append(
                PartName(
                    file=file,
                    numbers=1 + (tensor is not None) + (third is not None),
                    stage=int(stage),
                    tensor=int(tensor or 0),
                    replica=None if third is None else int(third),
                    save=save or None,
                )
            )
    taken = replica if replica in {part.replica for part in found} else 0
    return [part for part in found if part.replica in (None, taken)]


def ranks_sharing(parts: Iterable[PartName]) -> int:
    """Return how many ranks shared each tensor of a set of files."""
    return 1 + max(part.tensor for part in parts)
