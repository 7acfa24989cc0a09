"""The positions of Python's and NumPy's generators, read from their memory.

Comparing states would tell whether a step has drawn numbers, but copying both takes a twentieth of a short
step. Both are Mersenne Twisters: a draw moves a position within 624 words, and when it wraps around, all
words change. So the position and one word are enough, but not the first word, which is the same after every
seed.
"""

from __future__ import annotations

import ctypes
import random
import sys
from collections.abc import Callable
from functools import cache
from typing import Any

__all__ = ["Position", "generator_positions"]

_WORDS = 624
_BYTES = ctypes.sizeof(ctypes.c_uint32)
Position = tuple[int, int]  # the index into the words, and the second word


def generator_positions() -> tuple[Position, Position | None]:
    """Return the positions of Python's and NumPy's generators; None if NumPy has not been imported."""
    numpy = sys.modules.get("numpy")
    return _of_python()(), None if numpy is None else _of_numpy(numpy.random.get_bit_generator())()


@cache
def _of_python() -> Callable[[], Position]:
    """Return the position of ``random``, whose object has the index first, then the words."""
    generator: Any = random.seed.__self__  # type: ignore[attr-defined]
    begin = id(generator) + object.__basicsize__
    return _reading(begin, begin + _BYTES, lambda: random.getstate()[1])


@cache
def _of_numpy(generator: Any) -> Callable[[], Position]:
    """Return the position of NumPy's, which has the words first, then the index."""

    def state() -> tuple[int, ...]:
        words = generator.state["state"]
        return (*words["key"].tolist(), words["pos"])

    if type(generator).__name__ != "MT19937":  # replaced by numpy.random.set_bit_generator
        return lambda: (hash(repr(generator.state)), 0)
    begin = generator.ctypes.state_address
    return _reading(begin + _WORDS * _BYTES, begin, state)


def _reading(position: int, words: int, state: Callable[[], tuple[int, ...]]) -> Callable[[], Position]:
    """Return a function that reads these addresses if they hold index and words, else copies of the state."""

    def copied() -> Position:
        found = state()
        return found[_WORDS], found[1]

    at = ctypes.c_uint32.from_address(position)
    word = ctypes.c_uint32.from_address(words + _BYTES)

    def read() -> Position:
        return at.value, word.value

    return read if read() == copied() else copied
