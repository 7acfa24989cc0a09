"""Iterators among a module's arguments, which all ranks exhaust before the call.

The module runs on one rank, but what a generator or ``map`` does between its elements belongs to the
surrounding script, which every rank runs.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, MutableMapping
from types import GeneratorType
from typing import Any

from opensmd.modelparallel.exceptions import SMPUnsupportedError
from opensmd.modelparallel.runtime.tensors.structure import Arguments

__all__ = ["has_iterators", "is_iterator", "without_iterators"]

MOST = 10_000  # elements; an iterator with more may be infinite
# Not every iterator: files and data loaders are iterators, too, but concern one rank only.
_KINDS = frozenset(
    {
        GeneratorType,
        enumerate,
        filter,
        itertools.chain,
        itertools.islice,
        itertools.starmap,
        map,
        reversed,
        type(iter([])),
        type(iter(())),
        type(reversed([])),
        zip,
    }
)

Function = Callable[..., Any]


class _Elements(list[Any]):
    """The elements from an iterator."""


def is_iterator(value: Any) -> bool:
    """Whether this only computes its elements once, one by one, and does nothing else."""
    return type(value) in _KINDS


def has_iterators(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether an argument itself is an iterator."""
    return not _KINDS.isdisjoint(map(type, args)) or not _KINDS.isdisjoint(map(type, kwargs.values()))


def without_iterators(
    name: str,
    function: Function,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    used: MutableMapping[int, Any],
) -> tuple[Function, Arguments]:
    """Return ``function`` for arguments with lists in place of iterators, and these arguments.

    Args:
        name: the module's name in error messages.
        function: gets iterators again.
        args: those of the script.
        kwargs: likewise.
        used: iterators that were arguments before, by id; this call's are added.

    Raises:
        SMPUnsupportedError: an iterator was an argument before, or seems to be infinite.
    """

    def elements(value: Any) -> Any:
        return _elements(name, value, used) if is_iterator(value) else value

    def call(*args: Any, **kwargs: Any) -> Any:
        return function(*map(_again, args), **{key: _again(value) for key, value in kwargs.items()})

    return call, ((*map(elements, args),), {key: elements(value) for key, value in kwargs.items()})


def _elements(name: str, iterator: Iterator[Any], used: MutableMapping[int, Any]) -> list[Any]:
    kind = type(iterator).__name__
    if id(iterator) in used:
        raise SMPUnsupportedError(
            f"{name} was given a {kind} that a module has been given before. Ranks that do not run the "
            "module cannot know which elements are left: give a list each time"
        )
    used[id(iterator)] = iterator  # kept alive, so that no other gets its id
    elements = _Elements(itertools.islice(iterator, MOST))
    if len(elements) == MOST:
        raise SMPUnsupportedError(
            f"{name} was given a {kind} of {MOST} elements or more; all ranks make them before the call. "
            "Give the module a list of those that it needs"
        )
    return elements


def _again(value: Any) -> Any:
    """Return an iterator over these elements, and any other value unchanged."""
    return _each(value) if isinstance(value, _Elements) else value


def _each(elements: list[Any]) -> Iterator[Any]:
    yield from elements
