"""The walk from an attribute of a module to the ordinary objects behind it.

It passes through lists, dicts, tuples, objects' attributes, bound methods and closures. It ends at tensors,
modules, classes, and objects of the standard library and torch, which forwards do not fill::

    self.controller  ->  .stores  ->  ["down"]  ->  AttentionStore
"""

from __future__ import annotations

import functools
from collections import UserDict, UserList, deque
from collections.abc import Iterator
from enum import Enum
from types import CellType, FunctionType, MethodType, SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from opensmd.modelparallel.runtime.side_effects.containers import is_container
from opensmd.modelparallel.runtime.side_effects.objects.held import held, is_filled
from opensmd.modelparallel.runtime.side_effects.objects.libraries import is_of_library

__all__ = ["Path", "at", "is_object", "is_of_program", "objects_in", "path_to", "shown"]

# What has more behind it (a trainer, a tokenizer) is not for one forward, and slow to look at.
_MOST_VALUES = 1024
_MOST_ENTRIES = 256
_ORDINARY = frozenset({SimpleNamespace, UserDict, UserList})
_PLAIN = (Tensor, torch.dtype, torch.device, torch.Size)
_VALUES = frozenset({str, int, float, bool, type(None), bytes, complex})


class _Item(NamedTuple):
    """A step into a container or tuple."""

    key: Any

    def __str__(self) -> str:
        return f"[{self.key!r}]"


Path = tuple[Any, ...]  # steps: names of attributes, or items


def is_object(value: Any) -> bool:
    """Whether this is an ordinary object, whose attributes a forward may set."""
    kind: Any = type(value)
    return kind not in _VALUES and _is_ordinary(kind)


@functools.lru_cache(maxsize=4096)
def _is_ordinary(kind: type) -> bool:
    if issubclass(kind, (Tensor, nn.Module, type, Enum, BaseException)):
        return False
    if kind not in _ORDINARY and is_of_library(kind.__module__):
        return False
    return bool(kind.__dictoffset__) or any("__slots__" in vars(base) for base in kind.__mro__)


def objects_in(value: Any, seen: set[int] | None = None) -> list[tuple[Path, Any]]:
    """Return the ordinary objects and closures in ``value`` with the paths to them, each once.

    Args:
        value: where to begin.
        seen: the ids of what other walks have seen and this one leaves out; grows.
    """
    if type(value) in _VALUES or isinstance(value, (Tensor, nn.Module)):
        return []
    seen = set() if seen is None else seen
    found: list[tuple[Path, Any]] = []
    waiting: deque[tuple[Path, Any]] = deque([((), value)])
    count = 0
    while waiting:
        path, each = waiting.popleft()
        if type(each) in _VALUES or id(each) in seen or isinstance(each, (Tensor, nn.Module)):
            continue
        seen.add(id(each))
        count += 1
        if count > _MOST_VALUES:
            return []
        if is_object(each) or (isinstance(each, FunctionType) and _has_closure(each)):
            found.append((path, each))
        waiting.extend(((*path, step), inner) for step, inner in _inside(each))
    return found


def is_of_program(value: Any) -> bool:
    """Whether this is made of tensors, numbers, text, containers and ordinary objects.

    These mean the same on another rank; an object of a library may be a handle to something in this process.
    """
    seen: set[int] = set()
    waiting = [value]
    while waiting:
        each = waiting.pop()
        if type(each) in _VALUES or isinstance(each, _PLAIN) or id(each) in seen:
            continue
        seen.add(id(each))
        if is_container(each) or isinstance(each, tuple):
            waiting.extend(each.values() if isinstance(each, dict) else each)
        elif not is_object(each):
            return False
        if is_object(each):
            waiting.extend(held(each).values.values())
    return True


def at(path: Path, value: Any) -> Any:
    """Return what is at the end of a path from ``value``.

    Raises:
        LookupError, AttributeError, TypeError: there is nothing.
    """
    for step in path:
        value = value[step.key] if isinstance(step, _Item) else getattr(value, step)
    return value


def path_to(wanted: Any, value: Any) -> Path | None:
    """Return the path from ``value`` to what it is, or has behind it; None if there is none."""
    seen: set[int] = set()
    waiting: deque[tuple[Path, Any]] = deque([((), value)])
    while waiting and len(seen) <= _MOST_VALUES:
        path, each = waiting.popleft()
        if each is wanted:
            return path
        if type(each) not in _VALUES and id(each) not in seen and not isinstance(each, (Tensor, nn.Module)):
            seen.add(id(each))
            waiting.extend(((*path, step), inner) for step, inner in _inside(each))
    return None


def shown(*steps: Any) -> str:
    """Return a path as one writes it, for messages."""
    text = ""
    for step in map(str, steps):
        text += step if not text or not step or step.startswith("[") else f".{step}"
    return text


def _inside(value: Any) -> Iterator[tuple[Any, Any]]:
    if isinstance(value, tuple):
        yield from ((_Item(index), each) for index, each in enumerate(value))
    elif isinstance(value, dict) and is_container(value):
        if len(value) <= _MOST_ENTRIES:
            yield from ((_Item(key), each) for key, each in dict.items(value))
    elif isinstance(value, (list, deque)) and is_container(value):
        if len(value) <= _MOST_ENTRIES:
            yield from ((_Item(index), each) for index, each in enumerate(value))
    elif isinstance(value, MethodType):
        yield "__self__", value.__self__
        yield "__func__", value.__func__
    elif isinstance(value, functools.partial):
        yield from (("func", value.func), ("args", value.args), ("keywords", value.keywords))
    elif isinstance(value, FunctionType):
        if _has_closure(value):
            yield "__closure__", value.__closure__
    elif isinstance(value, CellType) and is_filled(value):
        yield "cell_contents", value.cell_contents
    if is_object(value):
        yield from held(value).values.items()


def _has_closure(function: FunctionType) -> bool:
    return bool(function.__closure__) and not is_of_library(function.__module__)
