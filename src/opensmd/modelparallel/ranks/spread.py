"""Tensors left in pieces: what would be gathered from ranks is only described, and collected later.

A checkpoint file has whole tensors, but no rank should need memory for all of them at once. Inside
:func:`left_in_pieces`, gathering returns a tensor without data, and :class:`InPieces` knows its pieces.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

__all__ = ["InPieces", "Spread", "left_in_pieces", "spread_over"]


@dataclass(frozen=True, kw_only=True)
class Spread:
    """A tensor whose flattened elements are those of the ranks, concatenated.

    Attributes:
        number: the same on all ranks, and unique to this data.
        piece: this rank's elements, flattened.
        shape: the whole tensor's.
        sizes: how many elements each rank of the group has.
    """

    number: int
    piece: Tensor
    shape: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def dtype(self) -> torch.dtype:
        """The type of the elements."""
        return self.piece.dtype


class InPieces:
    """The tensors left in pieces inside :func:`left_in_pieces`."""

    def __init__(self) -> None:
        self._spread: dict[int, tuple[Tensor, Spread]] = {}  # keeps tensors alive, so ids stay unique
        self._count = 0

    def note(self, own: Tensor, shape: torch.Size, sizes: Sequence[int]) -> Tensor:
        """Return a tensor without data in place of one with these pieces."""
        whole = own.new_empty(shape, device="meta")
        spread = self._new(own.detach().reshape(-1), tuple(shape), tuple(sizes))
        self._spread[whole.untyped_storage()._cdata] = whole, spread
        return whole

    def of(self, value: Any) -> Any:
        """Return the pieces of a tensor left in pieces, and other values unchanged."""
        if not isinstance(value, Tensor) or not value.is_meta:
            return value
        found = self._spread.get(value.untyped_storage()._cdata)
        return value if found is None else found[1]

    def flat_float(self, spread: Spread) -> Spread:
        """Return these elements, flattened and in FP32."""
        flat = (math.prod(spread.shape),)
        if spread.dtype is torch.float32:
            return dataclasses.replace(spread, shape=flat)
        return self._new(spread.piece.float(), flat, spread.sizes)

    def _new(self, piece: Tensor, shape: tuple[int, ...], sizes: tuple[int, ...]) -> Spread:
        self._count += 1
        return Spread(number=self._count, piece=piece, shape=shape, sizes=sizes)


_leaving: ContextVar[InPieces | None] = ContextVar("left_in_pieces", default=None)


@contextlib.contextmanager
def left_in_pieces() -> Iterator[InPieces]:
    """Suspend gathering in this thread; all ranks must enter, and would gather in the same order."""
    found = InPieces()
    token = _leaving.set(found)
    try:
        yield found
    finally:
        _leaving.reset(token)


def spread_over(own: Tensor, shape: torch.Size, sizes: Sequence[int]) -> Tensor | None:
    """Return the stand-in for a gathered tensor; None if it should be gathered."""
    leaving = _leaving.get()
    return None if leaving is None else leaving.note(own, shape, sizes)
