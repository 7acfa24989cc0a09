"""The signals that end a job, including SIGHUP, unless the caller ignores that, as ``nohup`` does."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

__all__ = ["ending", "ignore", "interruptible", "listen"]

_ENDING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)


def ending() -> list[signal.Signals]:
    """Return all, or all but SIGHUP. (Background jobs of a shell also ignore SIGINT, but not on request.)"""
    outlives_session = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    return [number for number in _ENDING if not (outlives_session and number == signal.SIGHUP)]


def listen(stop: Callable[[int, FrameType | None], None]) -> None:
    """Call ``stop`` at these signals, until torch's agent has ranks and installs its own handlers."""
    for number in ending():
        signal.signal(number, stop)


def ignore() -> None:
    """Ignore these signals, because the job is over and nothing may interrupt the cleanup."""
    for number in _ENDING:
        signal.signal(number, signal.SIG_IGN)


@contextmanager
def interruptible() -> Iterator[None]:
    """Let Ctrl-C during the import of torch, before :func:`listen`, end the command as it does later."""
    try:
        yield
    except KeyboardInterrupt:
        print(f"smdrun: ended by {signal.SIGINT.name}", file=sys.stderr)
        raise SystemExit(128 + signal.SIGINT) from None
