"""Iterators among a module's arguments: their elements are made before the call, by all ranks.

The module runs on one rank, but what a generator or ``map`` does between its elements belongs to the script
around the module, which every rank runs.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, MutableMapping
from types import GeneratorType
from typing import Any

from opensmd.modelparallel.exceptions import SMPUnsupportedError
from opensmd.modelparallel.runtime.tensors.structure import Arguments

__all__ = ["has_iterators", "is_iterator", "without_iterators"]

MOST = 10_000  # elements: one that has more may have no end
# Not every iterator: files and data loaders are some, too, and what they do concerns one rank.
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
    """What an iterator has given."""


def is_iterator(value: Any) -> bool:
    """Whether this computes its elements once, one after the other, and is nothing else besides."""
    return type(value) in _KINDS


def has_iterators(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether one is itself an argument."""
    return not _KINDS.isdisjoint(map(type, args)) or not _KINDS.isdisjoint(map(type, kwargs.values()))


def without_iterators(
    name: str,
    function: Function,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    used: MutableMapping[int, Any],
) -> tuple[Function, Arguments]:
    """``function`` for arguments that have lists in the place of iterators, and these arguments.

    Args:
        name: of the module in messages.
        function: gets iterators again.
        args: as the script gives them.
        kwargs: likewise.
        used: the iterators that have been arguments before, by id; those of this call are added.

    Raises:
        SMPUnsupportedError: an iterator has been an argument before, or has no end in sight.
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
    used[id(iterator)] = iterator  # kept, so that no other gets its id
    elements = _Elements(itertools.islice(iterator, MOST))
    if len(elements) == MOST:
        raise SMPUnsupportedError(
            f"{name} was given a {kind} of {MOST} elements or more; all ranks make them before the call. "
            "Give the module a list of those that it needs"
        )
    return elements


def _again(value: Any) -> Any:
    """An iterator over these elements; any other value as it is."""
    return _each(value) if isinstance(value, _Elements) else value


def _each(elements: list[Any]) -> Iterator[Any]:
    yield from elements
