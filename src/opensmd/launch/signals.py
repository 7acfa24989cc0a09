"""The signals that end a job: SIGHUP, too, unless the caller ignores it, as ``nohup`` does."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

__all__ = ["ending", "ignore", "interruptible", "listen"]

_ENDING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)


def ending() -> list[signal.Signals]:
    """All, or all but SIGHUP. (A shell's background jobs ignore SIGINT, too, but nobody asked for that.)"""
    outlives_session = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    return [number for number in _ENDING if not (outlives_session and number == signal.SIGHUP)]


def listen(stop: Callable[[int, FrameType | None], None]) -> None:
    """Call ``stop`` at these signals, until torch's agent has ranks: it installs handlers of its own."""
    for number in ending():
        signal.signal(number, stop)


def ignore() -> None:
    """The job is over: let nothing interrupt the tidying up."""
    for number in _ENDING:
        signal.signal(number, signal.SIG_IGN)


@contextmanager
def interruptible() -> Iterator[None]:
    """Let Ctrl-C before :func:`listen`, while torch is imported, end the command as it does afterwards."""
    try:
        yield
    except KeyboardInterrupt:
        print(f"smdrun: ended by {signal.SIGINT.name}", file=sys.stderr)
        raise SystemExit(128 + signal.SIGINT) from None
