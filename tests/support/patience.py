"""How long tests wait for what will come.

A machine that is busy with something else is no fault, so it is long: whatever takes longer hangs. Only a
test in which a wait must expire has a short time of its own, which begins when all is ready.
"""

from __future__ import annotations

import time
from collections.abc import Callable

__all__ = ["PATIENCE", "wait_until"]

PATIENCE = 240.0  # seconds; pytest's own timeout, in pyproject.toml, is a little longer


def wait_until(condition: Callable[[], bool], *, timeout: float = PATIENCE) -> None:
    """Look again and again, for ``timeout`` seconds.

    Raises:
        AssertionError: the condition still does not hold.
    """
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)
