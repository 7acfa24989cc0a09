"""Making a checkpointed function see the same contents of its arguments when it runs again.

Layers write into their arguments: keys and values into a cache, losses into a list. When backward runs them
again, they would write twice, on top of what later layers have written since::

    forward    notes the contents of caches and containers among the arguments; keeps those that change
    backward   restores these for the run, and then the program's current contents
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from typing import Any

from torch import Tensor, nn

from opensmd.modelparallel.runtime.side_effects.containers import (
    Content,
    content_of,
    is_container,
    same_content,
    set_content,
)
from opensmd.modelparallel.runtime.tensors import structure

__all__ = ["repeatable"]

# A cache has some objects a layer. What holds more (a tokenizer, a whole script) is not filled by layers.
_MOST_OBJECTS = 1024


def repeatable(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``function`` such that every later call sees its arguments' contents as the first one did."""
    first: list[_ArgumentsBefore] = []

    def call(*args: Any, **kwargs: Any) -> Any:
        if first:
            with first[0].as_they_were():
                return function(*args, **kwargs)
        contents = _ArgumentsBefore([*args, *kwargs.values()])
        result = function(*args, **kwargs)
        contents.forget_unchanged()
        first.append(contents)
        return result

    return call


class _ArgumentsBefore:
    """The contents of mutable objects in the arguments before a call."""

    def __init__(self, arguments: Sequence[Any]) -> None:
        self._before = [(each, _content(each)) for each in _objects_in(arguments)]

    def forget_unchanged(self) -> None:
        """Keep only what has changed and the path to it, which may be replaced; release all other tensors."""
        kept: set[int] = set()
        # From the innermost, which were found last.
        for each, before in reversed(self._before):
            inside = before.values() if isinstance(before, dict) else before
            if not same_content(before, _content(each)) or any(id(value) in kept for value in inside):
                kept.add(id(each))
        # Tuples are only on the path; their other contents are inputs, which may be offloaded.
        self._before = [
            (each, before)
            for each, before in self._before
            if id(each) in kept and not isinstance(each, tuple)
        ]

    @contextlib.contextmanager
    def as_they_were(self) -> Iterator[None]:
        """Restore the contents from before the first call while the context is open."""
        now = [(each, _content(each)) for each, _ in self._before]
        for each, content in self._before:
            _set(each, content)
        try:
            yield
        finally:
            for each, content in now:
                _set(each, content)


def _objects_in(arguments: Sequence[Any]) -> list[Any]:
    """Return containers, tuples and objects with attributes, each once; none if there are too many."""
    found: dict[int, Any] = {}
    waiting = deque(arguments)
    while waiting:
        value = waiting.popleft()
        if id(value) in found or not _is_walked(value):
            continue
        found[id(value)] = value
        if len(found) > _MOST_OBJECTS:
            return []
        content = _content(value)
        waiting.extend(content.values() if isinstance(content, dict) else content)
    return list(found.values())


def _is_walked(value: Any) -> bool:
    if isinstance(value, (Tensor, nn.Module)) or structure.is_plain(value):
        return False
    if isinstance(value, (tuple, list, MutableMapping)) or is_container(value):
        return True
    return structure.is_dataclass(value) or hasattr(value, "__dict__")


def _content(value: Any) -> Content:
    if isinstance(value, tuple):
        return list(value)
    return dict(vars(value)) if _is_object(value) else content_of(value)


def _set(value: Any, content: Content) -> None:
    if _is_object(value):
        vars(value).clear()
        vars(value).update(content)
    else:
        set_content(value, content)


def _is_object(value: Any) -> bool:
    walked = isinstance(value, (tuple, list, MutableMapping)) or is_container(value)
    return not walked and not structure.is_dataclass(value)
