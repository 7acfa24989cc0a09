"""What a checkpointed function finds in its arguments when it runs again: what its first run found there.

Layers write into what they are given: keys and values into a cache, losses into a list. When backward runs
them again they would do so twice, on top of what later layers have written since::

    forward    the contents of caches and containers among the arguments are noted; kept are those that change
    backward   these are put there for the time of the run; then what the program has there comes back
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

# A cache has some objects a layer. What holds more (a tokenizer, a whole script) is nothing that layers fill.
_MOST_OBJECTS = 1024


def repeatable(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, which finds its arguments' contents in every later call as in its first."""
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
    """The contents of mutable objects among arguments, and in them, before a call."""

    def __init__(self, arguments: Sequence[Any]) -> None:
        self._before = [(each, _content(each)) for each in _objects_in(arguments)]

    def forget_unchanged(self) -> None:
        """Keep what has changed and the way to it, as that may be replaced; and no other tensor alive."""
        kept: set[int] = set()
        # From the innermost, which were found last.
        for each, before in reversed(self._before):
            inside = before.values() if isinstance(before, dict) else before
            if not same_content(before, _content(each)) or any(id(value) in kept for value in inside):
                kept.add(id(each))
        # Tuples are only on the way; what they hold besides are inputs, which may be offloaded.
        self._before = [
            (each, before)
            for each, before in self._before
            if id(each) in kept and not isinstance(each, tuple)
        ]

    @contextlib.contextmanager
    def as_they_were(self) -> Iterator[None]:
        """Put back what was there before the first call, for the time of a context."""
        now = [(each, _content(each)) for each, _ in self._before]
        for each, content in self._before:
            _set(each, content)
        try:
            yield
        finally:
            for each, content in now:
                _set(each, content)


def _objects_in(arguments: Sequence[Any]) -> list[Any]:
    """Containers, tuples and objects with attributes, each once; none where there are too many."""
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
