"""Generators among a module's arguments: their elements are made before the call, by all ranks.

The module runs on one rank, but what a generator does between its elements belongs to the script around the
module, which every rank runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, MutableSet
from itertools import islice
from types import GeneratorType
from typing import Any

from opensmd.modelparallel.exceptions import SMPUnsupportedError

__all__ = ["has_generators", "without_generators"]

MOST = 10_000  # elements: one that has more may have no end

Function = Callable[..., Any]
Arguments = tuple[tuple[Any, ...], dict[str, Any]]


class _Elements(list[Any]):
    """What a generator has given."""


def has_generators(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether one is itself an argument."""
    return GeneratorType in map(type, args) or GeneratorType in map(type, kwargs.values())


def without_generators(
    name: str, function: Function, args: tuple[Any, ...], kwargs: dict[str, Any], used: MutableSet[Any]
) -> tuple[Function, Arguments]:
    """``function`` for arguments that have lists in the place of generators, and these arguments.

    Args:
        name: of the module in messages.
        function: gets generators again.
        args: as the script gives them.
        kwargs: likewise.
        used: the generators that have been arguments before; those of this call are added.

    Raises:
        SMPUnsupportedError: a generator has been an argument before, or has no end in sight.
    """

    def elements(value: Any) -> Any:
        return _elements(name, value, used) if isinstance(value, GeneratorType) else value

    def call(*args: Any, **kwargs: Any) -> Any:
        return function(*map(_again, args), **{key: _again(value) for key, value in kwargs.items()})

    return call, ((*map(elements, args),), {key: elements(value) for key, value in kwargs.items()})


def _elements(name: str, generator: Any, used: MutableSet[Any]) -> list[Any]:
    if generator in used:
        raise SMPUnsupportedError(
            f"{name} was given a generator that a module has been given before. Ranks that do not run the "
            "module cannot know which elements are left: give a list each time"
        )
    used.add(generator)
    elements = _Elements(islice(generator, MOST))
    if len(elements) == MOST:
        raise SMPUnsupportedError(
            f"{name} was given a generator of {MOST} elements or more; all ranks make them before the call. "
            "Give the module a list of those that it needs"
        )
    return elements


def _again(value: Any) -> Any:
    """A generator of these elements; any other value as it is."""
    return _each(value) if isinstance(value, _Elements) else value


def _each(elements: list[Any]) -> Iterator[Any]:
    yield from elements
