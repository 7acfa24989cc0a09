"""Iterators that are arguments of modules become lists on their way, and iterators again."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest

from opensmd.modelparallel.exceptions import SMPUnsupportedError
from opensmd.modelparallel.runtime.calls.iterators import MOST, has_iterators, without_iterators
from opensmd.modelparallel.runtime.tensors.structure import substitute


def count(least: int) -> Iterator[int]:
    yield from itertools.count(least)


@pytest.mark.parametrize(
    "argument",
    [
        (each for each in (1, 2)),
        iter([1, 2]),
        iter((1, 2)),
        map(int, "12"),
        filter(None, (1, 2)),
        reversed([2, 1]),
        itertools.chain((1,), (2,)),
    ],
    ids=lambda argument: type(argument).__name__,
)
def test_an_iterator_is_found_and_its_elements_are_given(argument: Iterator[int]) -> None:
    assert has_iterators((0, argument), {})
    assert has_iterators((), {"features": argument})
    called, (args, kwargs) = without_iterators("m", lambda features: [*features], (argument,), {}, {})
    assert args == ([1, 2],) and called(*args, **kwargs) == [1, 2]


def test_what_is_no_iterator_or_within_something_else_is_left_alone() -> None:
    with open(__file__) as file:  # noqa: PTH123 - any open file
        assert not has_iterators(([iter([])], "text", range(3)), {"features": file})


def test_the_function_gets_iterators_of_the_same_elements() -> None:
    def function(number: int, features: Iterator[int], *, more: Iterator[tuple[int, str]]) -> list[Any]:
        return [number, next(features), *features, *more]

    features, more = (each for each in (1, 2)), zip((3,), "a", strict=True)
    called, (args, kwargs) = without_iterators("m", function, (0, features), {"more": more}, {})
    assert args == (0, [1, 2]) and kwargs == {"more": [(3, "a")]}
    # as the runtime does with a call's arguments
    assert called(*substitute(args, iter(())), **substitute(kwargs, iter(()))) == [0, 1, 2, (3, "a")]


def test_a_generator_for_two_modules_is_refused() -> None:
    used: dict[int, Any] = {}
    features = (each for each in (1, 2))
    without_iterators("module 'a'", print, (features,), {}, used)
    with pytest.raises(SMPUnsupportedError, match="module 'b' was given a generator that a module"):
        without_iterators("module 'b'", print, (features,), {}, used)


def test_a_generator_without_end_is_refused() -> None:
    with pytest.raises(SMPUnsupportedError, match=f"module 'a' was given a generator of {MOST} elements"):
        without_iterators("module 'a'", print, (count(0),), {}, {})
