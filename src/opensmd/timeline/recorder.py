"""Writes what this rank does into a file of its own while the job runs, if OPENSMD_TIMELINE names a folder.

A thread of low frequency collects: what happens often is only put on a list (or stays in shared memory, where
the core keeps it anyway), so that recording costs next to nothing. Without the variable there is no recorder,
and no thread.
"""

from __future__ import annotations

import atexit
import os
import threading
import time
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path

from opensmd.environment.boot import boot_id
from opensmd.timeline.span import Span

__all__ = ["VARIABLE", "Recorder", "recorder"]

VARIABLE = "OPENSMD_TIMELINE"
SHORTEST, LONGEST = 0.02, 0.25  # seconds between two looks at the sources
A_LOOK = 64  # spans that one look should find: many share its cost, and no source holds fewer
MOST = 1_000_000  # spans of a rank; what follows is left out, and the page says so

Source = Callable[[], Iterable[Span]]


@cache
def recorder(rank: int) -> Recorder | None:
    """This process's recorder, started by the first call; None if no timeline is wanted.

    Args:
        rank: of this process in the job, the same in every call.

    Raises:
        OSError: the folder cannot be written to.
    """
    folder = os.environ.get(VARIABLE)
    if not folder:
        return None
    return Recorder(Path(folder), rank=rank)


class Recorder:
    """Collects spans until the process ends.

    Args:
        folder: for the file, made if need be.
        rank: of this process in the job.

    Attributes:
        paused: for as long as this is set, nobody is asked for anything.
    """

    def __init__(self, folder: Path, *, rank: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._file = (folder / f"rank-{rank}.tsv").open("w", encoding="utf-8")
        offset = time.time_ns() - time.perf_counter_ns()
        self._file.write(f"{rank}\t{boot_id()}\t{offset}\n")  # the clock is the machine's
        self._pid = os.getpid()
        self._spans: list[Span] = []
        self._written = 0
        self._sources: list[Source] = []
        self.paused = False
        self._lock = threading.Lock()
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._run, name="opensmd-timeline", daemon=True)
        self._thread.start()
        atexit.register(self.close)

    def add(self, spans: Iterable[Span]) -> None:
        """Record spans that have ended."""
        self._spans.extend(spans)

    def add_source(self, source: Source) -> None:
        """Ask ``source`` now and then for what is new."""
        self._sources.append(source)

    def drain(self) -> None:
        """Collect all there is now, before something that a source looks at goes away."""
        with self._lock:
            if not self._file.closed:
                self._collect()

    def close(self) -> None:
        """Collect the last spans and close the file."""
        if os.getpid() != self._pid:
            return  # a fork has neither the thread nor a right to the file
        self._ending.set()
        self._thread.join()
        self.drain()
        with self._lock:
            self._file.close()

    def _run(self) -> None:
        pause = SHORTEST
        while not self._ending.wait(pause):
            with self._lock:
                if not self._file.closed and not self.paused:
                    pause = _next_pause(pause, self._collect())

    def _collect(self) -> int:
        """Write what is new; return how much of it the sources had."""
        found = [span for source in self._sources for span in source()]
        self._spans.extend(found)
        spans, self._spans = self._spans, []
        spans = spans[: MOST - self._written]
        self._written += len(spans)
        self._file.writelines("\t".join(map(str, span)) + "\n" for span in spans)
        self._file.flush()
        return len(found)


def _next_pause(pause: float, found: int) -> float:
    """So long that the next look finds A_LOOK spans, if they come as often as before."""
    return min(LONGEST, max(SHORTEST, pause * A_LOOK / max(found, 1)))
