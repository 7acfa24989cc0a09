"""Compilers that run side by side, and that do not outlive the build they work for."""

from __future__ import annotations

import subprocess
import threading
from collections.abc import Sequence

import psutil

__all__ = ["Compilers"]


class Compilers:
    """Runs commands, in any thread, until :meth:`end`."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._running: set[subprocess.Popen[str]] = set()
        self._ended = False

    def run(self, command: Sequence[str]) -> subprocess.CompletedProcess[str]:
        """Run a command whose words may be in any language and encoding, and wait for it.

        Raises:
            InterruptedError: :meth:`end` has been called before.
        """
        with self._lock:
            if self._ended:
                raise InterruptedError("the build has ended")
            process = subprocess.Popen(
                command,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                encoding="utf-8",
                errors="backslashreplace",
            )
            self._running.add(process)
        try:
            out, err = process.communicate()
        except BaseException:  # a signal, in the main thread
            _end_tree(process)
            raise
        finally:
            with self._lock:
                self._running.discard(process)
        return subprocess.CompletedProcess(command, process.returncode, out, err)

    def end(self) -> None:
        """End all that run; those that were to follow do not begin."""
        with self._lock:
            self._ended = True
            running = list(self._running)
        for process in running:
            _end_tree(process)


def _end_tree(process: subprocess.Popen[str]) -> None:
    """A compiler is a driver with children that do the work, and does not end them when it is ended."""
    try:
        tree = [*psutil.Process(process.pid).children(recursive=True), psutil.Process(process.pid)]
    except psutil.NoSuchProcess:
        return
    for member in tree:
        try:
            member.kill()
        except psutil.NoSuchProcess:
            continue
