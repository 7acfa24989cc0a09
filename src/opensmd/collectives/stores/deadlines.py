"""Calls that end in time, though torch may block in them for ever.

The client of torch's store waits without a limit for the answer to most of what it asks, and holds its lock
meanwhile: a server that is stopped, and so keeps its connections, stops all of its clients.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import TypeVar

__all__ = ["GRACE", "call_within"]

GRACE = 1.0  # seconds after its own timeout in which a store that works says what has happened

Result = TypeVar("Result")


def call_within(seconds: float, call: Callable[[], Result]) -> Result:
    """What ``call`` returns or raises; it runs in a thread of its own.

    Args:
        seconds: to wait. A call that takes longer is left behind, with all it holds.
        call: releases the GIL where it blocks.

    Raises:
        TimeoutError: it did not return in time.
    """
    answer: queue.SimpleQueue[tuple[Result | None, BaseException | None]] = queue.SimpleQueue()

    def run() -> None:
        try:
            answer.put((call(), None))
        except BaseException as error:
            answer.put((None, error))

    threading.Thread(target=run, daemon=True, name="opensmd-call").start()
    try:
        result, error = answer.get(timeout=max(0.0, seconds))
    except queue.Empty:
        raise TimeoutError(f"no answer within {seconds:g} s") from None
    if error is not None:
        raise error
    return result  # type: ignore[return-value]
