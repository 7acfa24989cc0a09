"""Marks on modules that are created while a context is open (``smp.partition``, ``smp.tensor_parallelism``).

While at least one context of any kind is open, ``nn.Module.__init__`` is wrapped; it is restored when the
last one closes.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn

__all__ = ["CreationMark"]


class _Wrapped:
    """The number of open contexts in all threads, and torch's own constructor while there are any."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.count = 0
        self.original: Callable[..., None] = nn.Module.__init__


_wrapped = _Wrapped()
_marks: list[CreationMark] = []


class CreationMark:
    """One kind of mark, for one kind of context.

    Args:
        attribute: the key in a module's ``__dict__`` that says in which context it was created.
    """

    def __init__(self, attribute: str) -> None:
        self.attribute = attribute
        self._stack = threading.local()
        _marks.append(self)

    @property
    def values(self) -> list[Any]:
        """The marks that new modules of this thread get, the innermost context last."""
        if not hasattr(self._stack, "values"):
            self._stack.values = []
        values: list[Any] = self._stack.values
        return values

    @contextlib.contextmanager
    def put(self, value: Any) -> Iterator[None]:
        """Mark the modules that are created inside with ``value``."""
        self.values.append(value)
        _watch()
        try:
            yield
        finally:
            _unwatch()
            self.values.pop()


def _watch() -> None:
    with _wrapped.lock:
        _wrapped.count += 1
        if _wrapped.count > 1:
            return
        original = _wrapped.original = nn.Module.__init__

        def noting(self: nn.Module, *args: Any, **kwargs: Any) -> None:
            original(self, *args, **kwargs)
            for mark in _marks:
                if mark.values:
                    self.__dict__[mark.attribute] = mark.values[-1]

        nn.Module.__init__ = noting  # type: ignore[method-assign]


def _unwatch() -> None:
    with _wrapped.lock:
        _wrapped.count -= 1
        if _wrapped.count == 0:
            nn.Module.__init__ = _wrapped.original  # type: ignore[method-assign]
