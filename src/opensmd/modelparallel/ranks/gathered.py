"""Remembering which tensors were gathered from ranks: only the caller has them, and nobody writes to them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from weakref import WeakValueDictionary

from torch import Tensor

__all__ = ["Gathered", "newly_gathered", "noting_gathered"]


class Gathered:
    """The tensors gathered inside :func:`noting_gathered`.

    Args:
        is_wanted: whether this rank uses it; otherwise it gets tensors without data (on the meta device).
    """

    def __init__(self, *, is_wanted: bool = True) -> None:
        self._is_wanted = is_wanted
        self._tensors: WeakValueDictionary[int, Tensor] = WeakValueDictionary()

    def note(self, tensor: Tensor) -> Tensor:
        """Note a newly gathered tensor; return what the rank gets."""
        if not self._is_wanted:
            return tensor.to("meta")
        self._tensors[tensor.untyped_storage()._cdata] = tensor
        return tensor

    def has_all_of(self, tensor: Tensor) -> bool:
        """Whether all of the tensor's memory was gathered for it."""
        memory = tensor.untyped_storage()
        whole = tensor.is_contiguous() and memory.nbytes() == tensor.numel() * tensor.element_size()
        return whole and memory._cdata in self._tensors


_noting: ContextVar[Gathered | None] = ContextVar("noting_gathered", default=None)


@contextlib.contextmanager
def noting_gathered(*, is_wanted: bool = True) -> Iterator[Gathered]:
    """Record what this thread gathers inside."""
    found = Gathered(is_wanted=is_wanted)
    token = _noting.set(found)
    try:
        yield found
    finally:
        _noting.reset(token)


def newly_gathered(tensor: Tensor) -> Tensor:
    """Note ``tensor``, which was just gathered; return it, or one without data if it is not wanted here."""
    noting = _noting.get()
    return tensor if noting is None else noting.note(tensor)
