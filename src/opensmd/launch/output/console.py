"""The launcher's console: every rank's output with its rank in front, and the first failure first.

The ranks write into pipes, not files, so nothing grows on disk and nothing waits for a poll. A rank's
exception arrives as a report file instead of text on its standard error. Reports of lost peers are held back
for a moment, so that the traceback of the rank that failed first is shown before theirs.
"""

from __future__ import annotations

import os
import selectors
import signal
import sys
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TextIO

from opensmd.launch.leftovers import open_files
from opensmd.launch.output import reports, streams
from opensmd.launch.output.lines import LineAssembler, Segment
from opensmd.launch.output.log_files import LogFiles

__all__ = ["Console"]

HOLD = 1.0  # seconds that a report of lost communication waits for that of its cause
UPDATE_EVERY = 10.0  # seconds between shown states of a progress bar without a terminal
READS = 2  # reads per turn, each up to a pipe's capacity; then others have theirs
IDLE = 0.2  # seconds after which an unfinished line is shown on a terminal
_COLOURS = (36, 33, 32, 35, 34, 31)


@dataclass(eq=False)
class _Stream:
    """One pipe from one rank; ``write`` is None when no process is started that could open it."""

    rank: int
    out: TextIO
    read: int
    write: int | None
    lines: LineAssembler = field(default_factory=LineAssembler)
    shown: float = float("-inf")
    fed: float = 0.0


@dataclass(frozen=True)
class _Unfinished:
    """Whose line the cursor is in, and whether the next text replaces it."""

    stream: _Stream
    rewrite: bool


class Console(threading.Thread):
    """Reads the ranks' pipes and reports until :meth:`finish`.

    Once the reader of a pipe has left, ``reader_left`` is True and this process gets SIGTERM.
    """

    def __init__(self, *, prefix: bool = True, log_files: LogFiles | None = None) -> None:
        super().__init__(name="smdrun-console", daemon=True)
        self._log_files = log_files or LogFiles(None)
        self._prefix = prefix
        self._selector = selectors.DefaultSelector()
        self._lock = threading.Lock()
        self._streams: list[_Stream] = []
        self._reports: dict[Path, int] = {}
        self._held: dict[Path, tuple[float, reports.Report]] = {}
        self._texts: set[str] = set()
        self._cause_shown = False
        self._unfinished: _Unfinished | None = None  # only a terminal shows unfinished lines
        self._ending = threading.Event()
        self.reader_left = False

    def open(self, rank: int, out: TextIO) -> str:
        """Return a path; a rank's output written there appears on ``out``."""
        read, write = os.pipe()
        os.set_blocking(read, False)
        stream = _Stream(rank, out, read, write)
        with self._lock:
            self._streams.append(stream)
            self._selector.register(read, selectors.EVENT_READ, stream)
        return f"{open_files.folder()}/{write}"

    def expect_report(self, path: Path, rank: int) -> None:
        """Watch for the report of one rank."""
        with self._lock:
            self._reports[path] = rank

    def end_attempt(self, rank: int) -> None:
        """Close what the last processes of a rank have written to, once that is read: it starts again."""
        with self._lock:
            self._look_for_reports()
            self._reports = {path: other for path, other in self._reports.items() if other != rank}
            for stream in self._streams:
                if stream.rank == rank and stream.write is not None:
                    os.close(stream.write)
                    stream.write = None

    def run(self) -> None:
        """Forward output until :meth:`finish` is called."""
        while not self._ending.is_set():
            self._selector.select(timeout=0.05)
            with self._lock:
                self._drain()
                self._look_for_reports()
                self._show_rests()

    def finish(self) -> None:
        """Show all that is left and close the pipes; ordering the reports still held is up to the caller."""
        self._ending.set()
        self.join()
        with self._lock:
            self._drain()
            for stream in list(self._streams):
                self._close(stream)
            for path, rank in self._reports.items():
                self._log(rank, reports.read(path, rank))
        self._selector.close()
        self._log_files.close()

    def show_report(self, report: reports.Report) -> None:
        """Show a rank's traceback, unless the same text has been shown for another rank."""
        if self.was_shown(report):
            return
        self._texts.add(report.text)
        self._end_line()
        mark = self._mark(sys.stderr, report.rank)
        self._write(sys.stderr, "".join(f"{mark}{line}\n" for line in report.text.splitlines()))

    def was_shown(self, report: reports.Report) -> bool:
        """Whether :meth:`show_report` has nothing new to show for this report."""
        return not report.text or report.text in self._texts

    def say(self, text: str) -> None:
        """Show a line from the launcher itself."""
        self._end_line()
        self._write(sys.stderr, f"smdrun: {text}\n")

    def _drain(self) -> None:
        """Read all that is in the pipes now, but not more from a rank that never stops writing."""
        for stream in list(self._streams):
            for _ in range(READS):
                data = _read(stream.read)
                if data is None:
                    self._close(stream)
                if not data:
                    break
                stream.fed = time.monotonic()
                self._log(stream.rank, data)
                for segment in stream.lines.feed(data):
                    self._show(stream, segment)

    def _close(self, stream: _Stream) -> None:
        """Close a pipe through which nothing comes any more."""
        self._streams.remove(stream)
        if stream.lines.waiting:
            self._put(stream, stream.lines.take_rest().text, finished=True)
        self._selector.unregister(stream.read)
        os.close(stream.read)
        if stream.write is not None:
            os.close(stream.write)

    def _look_for_reports(self) -> None:
        now = time.monotonic()
        for path, rank in list(self._reports.items()):
            report = reports.read(path, rank)
            if report is not None:
                del self._reports[path]
                self._log(rank, report)
                self._held[path] = (now + HOLD if report.of_communication else now, report)
        due = [(report.nanoseconds, path) for path, (when, report) in self._held.items() if when <= now]
        if due:
            self._drain()
        for _, path in sorted(due):
            report = self._held.pop(path)[1]
            # consequences of what has been shown are only counted at the end
            if not (report.of_communication and self._cause_shown):
                self.show_report(report)
            self._cause_shown |= not report.of_communication

    def _log(self, rank: int, what: bytes | reports.Report | None) -> None:
        """Add what a rank wrote or reported to its log file."""
        data = what.text.encode(errors="surrogateescape") if isinstance(what, reports.Report) else what
        try:
            self._log_files.write(rank, data or b"")
        except OSError as error:
            self.say(f"the job goes on without --log-dir, which cannot be written: {error.strerror}")

    def _show(self, stream: _Stream, segment: Segment) -> None:
        if segment.end == "\n":
            self._put(stream, segment.text, finished=True)
        elif not segment.end:
            self._put(stream, segment.text, finished=False)
        elif stream.out.isatty():
            own = self._unfinished is not None and self._unfinished.stream is stream
            if segment.text or own:
                self._put(stream, segment.text, finished=False)
                self._unfinished = _Unfinished(stream, rewrite=True)
        elif segment.text and time.monotonic() - stream.shown >= UPDATE_EVERY:
            stream.shown = time.monotonic()
            self._put(stream, segment.text, finished=True)

    def _show_rests(self) -> None:
        """Show unfinished lines on a terminal when their rank pauses; elsewhere only at the very end."""
        for stream in self._streams:
            pauses = time.monotonic() - stream.fed > IDLE
            if stream.lines.waiting and pauses and stream.out.isatty():
                self._put(stream, stream.lines.take_rest().text, finished=False)

    def _put(self, stream: _Stream, text: str, *, finished: bool) -> None:
        """Write a line or part of one, after ending or rewriting the current unfinished line."""
        before = self._unfinished
        if before is None or before.stream is not stream:
            self._end_line()
            lead = self._mark(stream.out, stream.rank)
        else:
            lead = f"\r\x1b[K{self._mark(stream.out, stream.rank)}" if before.rewrite else ""
        self._unfinished = None if finished else _Unfinished(stream, rewrite=False)
        self._write(stream.out, f"{lead}{text}\n" if finished else f"{lead}{text}")

    def _end_line(self) -> None:
        if self._unfinished is not None:
            out = self._unfinished.stream.out
            self._unfinished = None
            self._write(out, "\n")

    def _write(self, out: TextIO, text: str) -> None:
        error = streams.put(out, text)
        if isinstance(error, BrokenPipeError):
            self.reader_left = True
            if not self._ending.is_set():
                os.kill(os.getpid(), signal.SIGTERM)
        elif error is not None:
            self.say(f"the job goes on without its output, which cannot be written: {error.strerror}")

    def _mark(self, out: TextIO, rank: int) -> str:
        if not self._prefix:
            return ""
        if out.isatty():
            return f"\x1b[{_COLOURS[rank % len(_COLOURS)]}m[{rank}]\x1b[0m "
        return f"[{rank}] "


def _read(fd: int) -> bytes | None:
    """Return what has come; None at the end, when nobody can write any more."""
    try:
        return os.read(fd, 65536) or None
    except BlockingIOError:
        return b""
