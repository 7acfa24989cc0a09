"""Generators that are arguments of modules become lists on their way, and generators again."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any
from weakref import WeakSet

import pytest

from opensmd.modelparallel.exceptions import SMPUnsupportedError
from opensmd.modelparallel.runtime.calls.generators import MOST, has_generators, without_generators
from opensmd.modelparallel.runtime.tensors.structure import substitute


def count(least: int) -> Iterator[int]:
    yield from itertools.count(least)


def test_only_generators_that_are_arguments_themselves_are_found() -> None:
    assert has_generators((1, (each for each in ())), {})
    assert has_generators((), {"features": (each for each in ())})
    assert not has_generators(([], iter([]), "text"), {"features": range(3)})


def test_the_function_gets_a_generator_of_the_same_elements() -> None:
    given: list[Any] = []

    def function(number: int, features: Iterator[int], *, more: Iterator[int]) -> list[int]:
        given.append(features)
        return [number, next(features), *features, *more]

    used: WeakSet[Any] = WeakSet()
    features, more = (each for each in (1, 2)), (each for each in (3,))
    called, (args, kwargs) = without_generators("m", function, (0, features), {"more": more}, used)
    assert args == (0, [1, 2]) and kwargs == {"more": [3]}
    # as the runtime does with a call's arguments
    assert called(*substitute(args, iter(())), **substitute(kwargs, iter(()))) == [0, 1, 2, 3]
    assert type(given[0]) is type(features)


def test_a_generator_for_two_modules_is_refused() -> None:
    used: WeakSet[Any] = WeakSet()
    features = (each for each in (1, 2))
    without_generators("module 'a'", print, (features,), {}, used)
    with pytest.raises(SMPUnsupportedError, match="module 'b' was given a generator that a module"):
        without_generators("module 'b'", print, (features,), {}, used)


def test_a_generator_without_end_is_refused() -> None:
    used: WeakSet[Any] = WeakSet()
    with pytest.raises(SMPUnsupportedError, match=f"module 'a' was given a generator of {MOST} elements"):
        without_generators("module 'a'", print, (count(0),), {}, used)
