"""Lists, mappings and dataclasses among a call's arguments, which the call may fill or empty.

Examples are a dict of keys and values that layers share, or a list to which each layer appends a loss. If a
tensor argument had to be fetched, the call gets copies of these containers; and where the call does not run,
nothing fills them. So changes are announced, and applied to the originals on every rank.
"""

from __future__ import annotations

import dataclasses
import functools
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Mapping, MutableMapping, Sequence
from typing import Any

from torch import Tensor

from opensmd.modelparallel.runtime.side_effects.objects.libraries import is_of_library
from opensmd.modelparallel.runtime.tensors import structure

__all__ = [
    "Containers",
    "Content",
    "added",
    "containers_in",
    "content_of",
    "is_container",
    "joined",
    "same_content",
    "set_content",
]

Content = dict[Any, Any] | list[Any]


class Containers:
    """The containers in a call's arguments, and their contents.

    Args:
        arguments: (args, kwargs).

    Attributes:
        containers: those found at first, whatever has been put into them since.
    """

    def __init__(self, arguments: Any) -> None:
        self.containers: list[Any] = []
        self._others: list[Any] = []
        # The tuple and dict of the arguments themselves are new for each call: no callee can fill them.
        args, kwargs = arguments
        for argument in (*args, *kwargs.values()):
            self._collect(argument)
        self._before = list(map(content_of, self.containers))

    def changed(self, tensors: list[Tensor]) -> bytes:
        """Return what has changed since, in the form for :meth:`fill`; empty if nothing has.

        Tensors are added to ``tensors``. What cannot be pickled is ignored.
        """
        changed = {}
        for number, (container, before) in enumerate(zip(self.containers, self._before, strict=True)):
            now = content_of(container)
            if not same_content(before, now) and structure.can_be_dumped(now, self._known):
                changed[number] = now
        return structure.dump(changed, tensors, self._known) if changed else b""

    def fill(self, contents: bytes, tensors: Sequence[Any]) -> None:
        """Apply the changes made to another rank's containers of the same call."""
        for number, content in structure.load(contents, tensors, self._known).items():
            set_content(self.containers[number], content)

    @property
    def _known(self) -> list[Any]:
        return [*self.containers, *self._others]

    def _collect(self, value: Any) -> None:
        if isinstance(value, (list, MutableMapping)) or structure.is_dataclass(value):
            self.containers.append(value)
            content = content_of(value)
            for inner in content.values() if isinstance(content, dict) else content:
                self._collect(inner)
        elif isinstance(value, tuple):
            for inner in value:
                self._collect(inner)
        elif isinstance(value, Mapping):
            for inner in value.values():
                self._collect(inner)
        # Both ends know objects other than tensors by position, so these need not be pickled.
        elif not isinstance(value, Tensor) and not structure.is_plain(value):
            self._others.append(value)


_KINDS: tuple[Any, ...] = (list, OrderedDict, dict, deque, set)


def is_container(value: Any) -> bool:
    """Whether this is a list, dict, deque or set, or one of a class of the script that stores as these do."""
    return _kind_of(value) is not None


def _kind_of(value: Any) -> Any:
    own: Any = type(value)
    return _kind(own)


@functools.lru_cache(maxsize=4096)
def _kind(own: Any) -> Any:
    """Return which kind of container the instances of a class are; None if of none.

    Instances of classes that do more than store (in ModuleList, in transformers' outputs) are none.
    """
    kind = next((kind for kind in _KINDS if issubclass(own, kind)), None)
    if own in (kind, defaultdict, Counter) or kind is None:
        return kind
    stores = own.__setitem__ is kind.__setitem__ if hasattr(kind, "__setitem__") else True
    return kind if stores and not is_of_library(own.__module__) else None


def containers_in(value: Any) -> list[Any]:
    """Return the containers in ``value``, outermost first, each once."""
    found: dict[int, Any] = {}
    _collect(value, found)
    return list(found.values())


def _collect(value: Any, found: dict[int, Any]) -> None:
    # A container may hold itself.
    if is_container(value) and id(value) not in found:
        found[id(value)] = value
        for inner in value.values() if isinstance(value, Mapping) else value:
            _collect(inner, found)


def content_of(container: Any) -> Content:
    """Return the current content of a list, mapping or dataclass."""
    kind = _kind_of(container)
    if kind is not None:
        # Whatever its class has defined anew.
        return dict(kind.items(container)) if issubclass(kind, dict) else [*kind.__iter__(container)]
    if isinstance(container, list):
        return list(container)
    if isinstance(container, Mapping):
        return dict(container.items())
    names = (field.name for field in dataclasses.fields(container))
    return {name: getattr(container, name) for name in names if hasattr(container, name)}


def set_content(container: Any, content: Any) -> None:
    """Replace the content by ``content``."""
    kind = _kind_of(container)
    if kind is list or (kind is None and isinstance(container, list)):
        list.__setitem__(container, slice(None), content)
    elif kind is not None:
        kind.clear(container)
        (deque.extend if kind is deque else kind.update)(container, content)  # also restores a dict's order
    elif isinstance(container, MutableMapping):
        # In other mappings, only change what differs: setting may have side effects.
        for key in [key for key in container if key not in content]:
            del container[key]
        for key, value in content.items():
            if key not in container or container[key] is not value:
                container[key] = value
    else:
        for name, value in content.items():
            # Even frozen dataclasses may hold changing lists, and be rebuilt.
            object.__setattr__(container, name, value)


def added(first: Content, now: Content) -> Content | None:
    """Return what was added to ``first``; None if anything in it was removed or replaced."""
    if isinstance(first, dict) and isinstance(now, dict):
        if all(key in now and now[key] is value for key, value in first.items()):
            return {key: value for key, value in now.items() if key not in first}
        return None
    start, end = list(now)[: len(first)], list(now)[len(first) :]
    return end if same_content(list(first), start) else None


def joined(content: Content, more: Content) -> Content:
    """Return ``content`` followed by ``more``, which was added to something like it."""
    if isinstance(content, dict) and isinstance(more, dict):
        return {**content, **more}
    return [*content, *more]


def same_content(before: Content, now: Content) -> bool:
    """Whether two contents are the same objects, or equal numbers and strings, in the same order."""
    if isinstance(before, dict) and isinstance(now, dict):
        return list(before) == list(now) and all(map(_same_value, before.values(), now.values()))
    return len(before) == len(now) and all(map(_same_value, before, now))


def _same_value(before: Any, now: Any) -> bool:
    if before is now:
        return True
    # Equal tensors are not the same: a different object has a different graph.
    return isinstance(now, (str, int, float)) and type(before) is type(now) and bool(before == now)
