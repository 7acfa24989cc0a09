"""Time limits for calls in which torch may block forever.

The client of torch's store waits without limit for most answers, holding its lock: a stopped server, which
keeps its connections, stops all of its clients.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import TypeVar

__all__ = ["GRACE", "call_within"]

GRACE = 1.0  # seconds after its own timeout within which a working store reports what happened

Result = TypeVar("Result")


def call_within(seconds: float, call: Callable[[], Result]) -> Result:
    """Return or raise what ``call`` does; it runs in its own thread.

    Args:
        seconds: how long to wait. A call that takes longer is abandoned, with all it holds.
        call: must release the GIL when it blocks.

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
