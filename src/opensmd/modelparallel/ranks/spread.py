"""Tensors that stay in pieces: what would be gathered from ranks is described, and collected piece by piece.

A checkpoint's file has whole tensors, but no rank needs memory for all of them at once: inside
:func:`left_in_pieces` a gathering returns a tensor without data, and :class:`InPieces` knows its pieces.
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
    """A tensor whose elements in a row are those of one rank after the other.

    Attributes:
        number: the same on all ranks, and of no tensor with other data.
        piece: this rank's elements, in a row.
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
    """What was left in pieces inside :func:`left_in_pieces`."""

    def __init__(self) -> None:
        self._spread: dict[int, tuple[Tensor, Spread]] = {}  # the tensors keep their numbers from others
        self._count = 0

    def note(self, own: Tensor, shape: torch.Size, sizes: Sequence[int]) -> Tensor:
        """A tensor without data, in the place of one with these pieces."""
        whole = own.new_empty(shape, device="meta")
        spread = self._new(own.detach().reshape(-1), tuple(shape), tuple(sizes))
        self._spread[whole.untyped_storage()._cdata] = whole, spread
        return whole

    def of(self, value: Any) -> Any:
        """The pieces of a value that was left so; other values as they are."""
        if not isinstance(value, Tensor) or not value.is_meta:
            return value
        found = self._spread.get(value.untyped_storage()._cdata)
        return value if found is None else found[1]

    def flat_float(self, spread: Spread) -> Spread:
        """These elements in a row and in FP32."""
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
    """Gather nothing in this thread meanwhile; all ranks enter it, and would gather in one order."""
    found = InPieces()
    token = _leaving.set(found)
    try:
        yield found
    finally:
        _leaving.reset(token)


def spread_over(own: Tensor, shape: torch.Size, sizes: Sequence[int]) -> Tensor | None:
    """What is returned in the place of a gathered tensor; None where it is to be gathered."""
    leaving = _leaving.get()
    return None if leaving is None else leaving.note(own, shape, sizes)
