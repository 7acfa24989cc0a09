"""Writes what this rank does into a file of its own while the job runs, if OPENSMD_TIMELINE names a folder.

What happens is only put where it costs least: calls into a ring that the core fills without Python, a step's
record as it is onto a list. A thread empties both a few times a second, and at once when the ring is half
full, and writes them down as they lie. Without the variable there is no recorder, and no thread.
"""

from __future__ import annotations

import atexit
import os
import select
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from opensmd.environment.boot import boot_id
from opensmd.environment.wall_clock import wall_clock_offset
from opensmd.timeline.frames import BEGINNING, CUT, Part, Stretch, begin_frame, expected_frame, step_frame
from opensmd.timeline.own_files import require_own

__all__ = ["VARIABLE", "Frame", "Recorder", "recorder"]

VARIABLE = "OPENSMD_TIMELINE"
PAUSE = 0.25  # seconds between two looks at what has happened: as much is lost at most where a rank is killed
MOST = 1_000_000  # events of a rank; what follows is left out, and the page says so


class Frame(NamedTuple):
    """What a source has to write (see ``frames``), and how many events that holds."""

    content: bytes
    events: int


Source = Callable[[], Iterable[Frame]]


_of_process: list[Recorder] = []  # at most one: what the core notes can be taken but once


def recorder(rank: int) -> Recorder | None:
    """This process's recorder, started by the first call; None if no timeline is wanted.

    Args:
        rank: of this process in the job. The first call counts, should a script change it with its groups.

    Raises:
        OSError: the folder cannot be written to.
        ValueError: something else has written the file that would be this rank's.
    """
    folder = os.environ.get(VARIABLE)
    if folder and not _of_process:
        _of_process.append(Recorder(Path(folder), rank=rank))
    return _of_process[0] if _of_process else None


class Recorder:
    """Collects events until the process ends.

    Args:
        folder: for the file, made if need be.
        rank: of this process in the job.

    Attributes:
        paused: for as long as this is set, nobody is asked for anything.
        alarm: a descriptor; a byte in it lets the recorder look at once.

    Raises:
        OSError, ValueError: as from :func:`recorder`.
    """

    def __init__(self, folder: Path, *, rank: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"rank-{rank}.events"
        if path.exists():
            require_own(path, BEGINNING)
        self._file = path.open("wb")
        self._file.write(begin_frame(rank, boot_id(), wall_clock_offset()))  # the clock is the machine's
        self._pid = os.getpid()
        # Steps as they came, and in front of the first that needs it what a plan expects.
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
        """Put down a step that has ended.

        Args:
            stretches: which nobody changes any more.
            expected: the number that :meth:`add_expected` gave, or NOTHING_EXPECTED.
        """
        self._steps.append((expected, stretches))

    def add_expected(self, parts: Iterable[Part]) -> int:
        """Put down what a plan expects of this rank in a step; return the number that steps call it by."""
        self._steps.append(Frame(expected_frame(self._plans, parts), 0))
        self._plans += 1
        return self._plans - 1

    def add_source(self, source: Source) -> None:
        """Ask ``source`` now and then for what is new."""
        self._sources.append(source)

    def close(self) -> None:
        """Collect the last events and close the file."""
        if os.getpid() != self._pid:
            return  # a fork has neither the thread nor a right to the file
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
        """Write what is new."""
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
