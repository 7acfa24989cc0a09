"""Writing what this rank does to its own file while the job runs, if OPENSMD_TIMELINE names a folder.

Events first go where that is cheapest: calls into a ring that the core fills without Python, and a step's
record onto a list, unchanged. A thread empties both a few times a second, and immediately when the ring is
half full, and writes them as they are. Without the variable, there is no recorder and no thread.
"""

from __future__ import annotations

import atexit
import os
import select
import threading
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from io import BufferedWriter
from pathlib import Path
from typing import NamedTuple

from opensmd.environment.boot import boot_id
from opensmd.environment.wall_clock import wall_clock_offset
from opensmd.timeline.frames import BEGINNING, CUT, Part, Stretch, begin_frame, expected_frame, step_frame
from opensmd.timeline.own_files import require_own

__all__ = ["VARIABLE", "Frame", "Recorder", "recorder"]

VARIABLE = "OPENSMD_TIMELINE"
PAUSE = 0.25  # seconds between looks, and the most that is lost when a rank is killed
MOST = 1_000_000  # events per rank; the rest is left out, and the page says so


class Frame(NamedTuple):
    """What a source has to write (see ``frames``), and its number of events."""

    content: bytes
    events: int


Source = Callable[[], Iterable[Frame]]


_of_process: list[Recorder] = []  # at most one, because the core's events can be taken only once


def recorder(rank: int) -> Recorder | None:
    """Return this process's recorder, started by the first call; None if no timeline is wanted.

    Args:
        rank: this process's rank in the job. The first call counts, even if a script changes it with its
            groups.

    Raises:
        ValueError: the folder cannot be written, or something else has written a file of this rank's name.
    """
    folder = os.environ.get(VARIABLE)
    if folder and not _of_process:
        _of_process.append(Recorder(Path(folder), rank=rank))
    return _of_process[0] if _of_process else None


class Recorder:
    """Collects events until the process ends.

    Args:
        folder: for the file; created if needed.
        rank: this process's rank in the job.

    Attributes:
        paused: while set, no source is asked.
        alarm: a descriptor; a byte written to it makes the recorder look at once.

    Raises:
        ValueError: as in :func:`recorder`.

    Warns:
        RuntimeWarning: the file cannot be written any more, as on a full disk.
    """

    def __init__(self, folder: Path, *, rank: int) -> None:
        self._path = folder / f"rank-{rank}.events"
        self._file = _opened(self._path)
        self._file.write(begin_frame(rank, boot_id(), wall_clock_offset()))  # the clock is the machine's
        self._pid = os.getpid()
        # Steps in order, and before the first that needs it, what a plan expects.
        self._steps: deque[tuple[int, Sequence[Stretch]] | Frame] = deque()
        self._plans = 0
        self._events = 0
        self._sources: list[Source] = [self._take_steps]
        self.paused = False
        self._hears, self.alarm = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._lock = threading.Lock()
        self._ending = False
        self._thread = threading.Thread(target=self._run, name="opensmd-timeline", daemon=True)
        self._thread.start()
        atexit.register(self.close)

    def add_step(self, stretches: Sequence[Stretch], expected: int) -> None:
        """Record a finished step.

        Args:
            stretches: must no longer change.
            expected: the number from :meth:`add_expected`, or NOTHING_EXPECTED.
        """
        self._steps.append((expected, stretches))

    def add_expected(self, parts: Iterable[Part]) -> int:
        """Record what a plan expects of this rank in a step; return the number by which steps refer to it."""
        self._steps.append(Frame(expected_frame(self._plans, parts), 0))
        self._plans += 1
        return self._plans - 1

    def add_source(self, source: Source) -> None:
        """Ask ``source`` regularly for what is new."""
        self._sources.append(source)

    def close(self) -> None:
        """Collect the last events and close the file."""
        if os.getpid() != self._pid:
            return  # a forked process has no thread and must not touch the file
        self._ending = True
        os.write(self.alarm, b"\0")
        self._thread.join()
        with self._lock:
            if not self._file.closed:
                self._collect()
                self._file.close()

    def _run(self) -> None:
        while not self._ending:
            if select.select([self._hears], [], [], PAUSE)[0]:
                os.read(self._hears, 4096)
            with self._lock:
                if not self._file.closed and not self.paused:
                    self._collect()

    def _collect(self) -> None:
        """Write what is new; if that fails, warn, and throw it away from then on."""
        try:
            self._write_new()
        except OSError as error:
            self._file.raw.close()  # closing the file itself would write its buffer
            self._file = _opened(Path(os.devnull))
            warnings.warn(
                f"this rank's timeline ends here: {self._path} cannot be written ({error.strerror})",
                RuntimeWarning,
                stacklevel=2,
            )

    def _write_new(self) -> None:
        for source in self._sources:
            for frame in source():
                if self._events > MOST:
                    continue
                self._events += frame.events
                self._file.write(CUT if self._events > MOST else frame.content)
        self._file.flush()

    def _take_steps(self) -> Iterator[Frame]:
        while self._steps:
            step = self._steps.popleft()
            if isinstance(step, Frame):
                yield step
            else:
                expected, stretches = step
                yield Frame(step_frame(expected, stretches), len(stretches))


def _opened(path: Path) -> BufferedWriter:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.is_file():
            require_own(path, BEGINNING)
        return path.open("wb")
    except OSError as error:
        why = "a file has its name" if isinstance(error, FileExistsError) else error.strerror
        raise ValueError(f"{VARIABLE}={str(path.parent)!r}: cannot write to that folder: {why}") from error
