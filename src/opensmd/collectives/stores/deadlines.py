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
LOOK_EVERY = 0.25  # seconds

Result = TypeVar("Result")


def call_within(seconds: float, call: Callable[[], Result], look: Callable[[], None] | None = None) -> Result:
    """Return or raise what ``call`` does; it runs in its own thread.

    Args:
        seconds: how long to wait. A call that takes longer is abandoned, with all it holds.
        call: must release the GIL when it blocks.
        look: is called again and again while ``call`` takes long, in another thread. What it raises is raised
            here, and the call abandoned.

    Raises:
        TimeoutError: it did not return in time.
    """
    answer: queue.SimpleQueue[tuple[Result | None, BaseException | None]] = queue.SimpleQueue()
    over = threading.Event()
    seen: list[BaseException] = []

    def run() -> None:
        try:
            answer.put((call(), None))
        except BaseException as error:
            answer.put((None, error))

    def look_out() -> None:
        try:
            while look is not None and not over.wait(LOOK_EVERY):
                look()
        except BaseException as error:
            seen.append(error)
            answer.put((None, error))

    caller = _started(run)
    looker = None if look is None else _started(look_out)
    try:
        result, error = answer.get(timeout=max(0.0, seconds))
    except queue.Empty:
        raise TimeoutError(f"no answer within {seconds:g} s") from None
    finally:
        # Threads that come out of torch while the interpreter ends would abort the process.
        over.set()
        if looker is not None:
            looker.join(GRACE)
        if seen:
            caller.join(GRACE)
    if seen:  # first: the look may have let the call return
        raise seen[0]
    if error is not None:
        raise error
    return result  # type: ignore[return-value]


def _started(function: Callable[[], None]) -> threading.Thread:
    thread = threading.Thread(target=function, daemon=True, name="opensmd-call")
    thread.start()
    return thread
