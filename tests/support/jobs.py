"""Jobs of a test that need nothing of each other, side by side.

Most of a small job's time goes into starting it, on one core: a second job has the others.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

__all__ = ["both"]

One = TypeVar("One")
Other = TypeVar("Other")


def both(one: Callable[[], One], other: Callable[[], Other]) -> tuple[One, Other]:
    """What two functions return that run at once, the first in a thread of its own."""
    with ThreadPoolExecutor(1) as thread:
        first = thread.submit(one)
        second = other()
        return first.result(), second
