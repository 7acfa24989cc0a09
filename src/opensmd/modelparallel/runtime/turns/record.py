"""What a rank did in a step, and when, for the pipeline chart and the Chrome trace."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from typing import NamedTuple

__all__ = ["Record", "Stretch"]


class Stretch(NamedTuple):
    """One stretch of work or waiting; times are ``time.perf_counter_ns()``.

    Attributes:
        microbatch: -1 for waiting.
        kind: "forward", "backward", "weights" (the part of a backward left for later) or "wait".
    """

    microbatch: int
    kind: str
    start_ns: int
    end_ns: int


class Record:
    """The stretches of one step."""

    def __init__(self) -> None:
        # Plain tuples: they are created at every turn, Stretches only on request.
        self._ended: list[tuple[int, str, int, int]] = []
        self.kind = "forward"
        self._microbatch = -1
        self._start = 0

    @property
    def stretches(self) -> list[Stretch]:
        """Return the finished stretches, in order."""
        return [Stretch(*fields) for fields in self._ended]

    @property
    def ended(self) -> Sequence[tuple[int, str, int, int]]:
        """Return the same as tuples, for keeping."""
        return self._ended

    def spent(self, kind: str) -> dict[int, int]:
        """Return nanoseconds of a kind, by microbatch."""
        nanoseconds: dict[int, int] = {}
        for microbatch, other, start, end in self._ended:
            if other == kind:
                nanoseconds[microbatch] = nanoseconds.get(microbatch, 0) + end - start
        return nanoseconds

    def begin(self, microbatch: int, kind: str) -> None:
        """Start a stretch of a microbatch now."""
        self._microbatch, self.kind, self._start = microbatch, kind, time.perf_counter_ns()

    def end(self) -> None:
        """End the current stretch now."""
        self._ended.append((self._microbatch, self.kind, self._start, time.perf_counter_ns()))

    def turn(self, kind: str) -> None:
        """Switch the microbatch from forward to backward or back."""
        now = time.perf_counter_ns()
        self._ended.append((self._microbatch, self.kind, self._start, now))
        self.kind, self._start = kind, now

    @contextlib.contextmanager
    def interrupted(self) -> Iterator[None]:
        """Interrupt the current stretch for something else, and continue it afterwards."""
        microbatch, kind = self._microbatch, self.kind
        self.end()
        yield
        self.begin(microbatch, kind)
