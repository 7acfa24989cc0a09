"""Where Python's and NumPy's generators are, read from their memory.

Whether a step has drawn numbers could be told from their states, but a copy of both takes a twentieth of a
short step. Both are Mersenne Twisters: a draw moves a position within 624 words, and when it comes round, all
words change. So the position and one of the words tell the same, but not the first, which is the same after
every seed.
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
Position = tuple[int, int]  # in the words, and the second word


def generator_positions() -> tuple[Position, Position | None]:
    """Of Python's generator and of NumPy's; None where nobody has imported NumPy."""
    numpy = sys.modules.get("numpy")
    return _of_python()(), None if numpy is None else _of_numpy(numpy.random.get_bit_generator())()


@cache
def _of_python() -> Callable[[], Position]:
    """Of ``random``, whose object has the position first and then the words."""
    generator: Any = random.seed.__self__  # type: ignore[attr-defined]
    begin = id(generator) + object.__basicsize__
    return _reading(begin, begin + _BYTES, lambda: random.getstate()[1])


@cache
def _of_numpy(generator: Any) -> Callable[[], Position]:
    """Of NumPy's, which has the words first and then the position."""

    def state() -> tuple[int, ...]:
        words = generator.state["state"]
        return (*words["key"].tolist(), words["pos"])

    if type(generator).__name__ != "MT19937":  # by numpy.random.set_bit_generator
        return lambda: (hash(repr(generator.state)), 0)
    begin = generator.ctypes.state_address
    return _reading(begin + _WORDS * _BYTES, begin, state)


def _reading(position: int, words: int, state: Callable[[], tuple[int, ...]]) -> Callable[[], Position]:
    """Reads at these addresses, if that is where a position and words are; else from copies of the state."""

    def copied() -> Position:
        found = state()
        return found[_WORDS], found[1]

    at = ctypes.c_uint32.from_address(position)
    word = ctypes.c_uint32.from_address(words + _BYTES)

    def read() -> Position:
        return at.value, word.value

    return read if read() == copied() else copied
