"""What a user sees while the core is compiled: a bar on a terminal, a few plain lines elsewhere.

The remaining time is estimated from the finished steps and their relative times or, before there is one, from
the load of the machine. Only the compiling process shows it; those that wait for it are silent.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import TextIO

__all__ = ["BuildProgress", "expected_pace"]

QUIET = 1.0  # seconds within which a build may end silently
BUSY = 1.5  # the pace from which on the machine is called busy
FIRST = 15.0  # seconds until the second plain line; doubled for each further one


class BuildProgress:
    """Shows the progress of a build, from ``with`` to its end.

    Args:
        steps: roughly the seconds each step takes on one processor.
        workers: how many steps run in parallel.
        what: what is compiled, in a few words.
        pace: how many seconds one second of a step is expected to take; more on a busy machine.
        out: where to show it; by default, standard error.
    """

    def __init__(
        self,
        steps: Sequence[float],
        *,
        workers: int,
        what: str,
        pace: float = 1.0,
        out: TextIO | None = None,
    ) -> None:
        self._total, self._count = sum(steps), len(steps)
        self._workers, self._what, self._first_pace = workers, what, pace
        self._out = sys.stderr if out is None else out
        self._lock = threading.Lock()
        self._finished = 0
        self._work_done = 0.0
        self._seconds_done = 0.0
        self._running: dict[object, tuple[float, float]] = {}
        self._begun = 0.0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._show, name="opensmd-build-progress", daemon=True)

    def __enter__(self) -> BuildProgress:
        self._begun = time.monotonic()
        if self._count:
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self._ended.set()
        if self._count:
            self._thread.join()

    @contextmanager
    def step(self, seconds: float) -> Iterator[None]:
        """Wrap one step, which counts as done if it ends without an exception."""
        key, begun = object(), time.monotonic()
        with self._lock:
            self._running[key] = (seconds, begun)
        try:
            yield
            with self._lock:
                self._finished += 1
                self._work_done += seconds
                self._seconds_done += time.monotonic() - begun
        finally:
            with self._lock:
                del self._running[key]

    def remaining(self) -> float:
        """Return roughly the remaining seconds, at the pace of the finished steps."""
        now = time.monotonic()
        with self._lock:
            running = [(expected, now - begun) for expected, begun in self._running.values()]
            waiting = self._total - self._work_done - sum(expected for expected, _ in running)
            pace = self._pace(running)
        # A step that takes longer than expected is never quite done.
        left = [max(0.1 * pace * expected, pace * expected - spent) for expected, spent in running]
        return max((pace * waiting + sum(left)) / self._workers, max(left, default=0.0))

    def _pace(self, running: Sequence[tuple[float, float]]) -> float:
        """Return the seconds that one second of expected work takes, counting steps that are already late."""
        of_done = self._seconds_done / self._work_done if self._work_done else self._first_pace
        return max([of_done, *(spent / expected for expected, spent in running)])

    def _show(self) -> None:
        if self._ended.wait(QUIET):
            return
        if self._out.isatty():
            self._show_bar()
        else:
            self._show_lines()

    def _show_lines(self) -> None:
        busy = " (other processes keep the machine busy)" if self._first_pace >= BUSY else ""
        self._say(f"compiling {self._what}, {self._rest()}{busy}")
        pause = FIRST
        while not self._ended.wait(pause):
            pause *= 2
            self._say(f"compiling: {self._finished} of {self._count} steps done, {self._rest()}")
        if self._finished == self._count:
            self._say(f"compiled in {time.monotonic() - self._begun:.0f} s")

    def _show_bar(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn

        columns = (
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            TextColumn("{task.fields[rest]}"),
        )
        with Progress(*columns, console=Console(file=self._out), transient=True) as bar:
            task = bar.add_task(f"opensmd: compiling {self._what}", total=1.0, rest=self._rest())
            while not self._ended.wait(0.25):
                seconds, rest = time.monotonic() - self._begun, self.remaining()
                bar.update(task, completed=seconds / (seconds + rest), rest=self._rest())

    def _rest(self) -> str:
        return f"about {max(1, round(self.remaining()))} s left"

    def _say(self, text: str) -> None:
        print(f"opensmd: {text}", file=self._out, flush=True)


def expected_pace(workers: int, *, running: float, processors: int) -> float:
    """Return how many seconds one second of a processor's work takes next to other processes.

    Args:
        workers: how many processes are about to start.
        running: how many already want a processor, on average.
        processors: how many they share.
    """
    return max(1.0, (workers + running) / processors)
