"""Running compilers in parallel, without letting them outlive their build.

A compiler is a driver whose children do the work, and neither it nor the kernel ends them when it dies. So
all are in one process group, led by a shell that reads from a pipe of ours: if the pipe ends, this process is
gone, however it ended, and the shell ends its group.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
from collections.abc import Sequence
from types import TracebackType

__all__ = ["Compilers"]

# At SIGTERM a compiler removes its temporary files; the leader itself has to survive the signal.
LEADER = "trap '' TERM INT HUP; read word; kill -TERM 0; sleep 1; kill -KILL 0"
TIDY = 1.0  # seconds for removing them


class Compilers:
    """Runs commands, in any thread, until the end of its ``with`` block or :meth:`end`."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._running: set[subprocess.Popen[str]] = set()
        self._ended = False
        nowhere = subprocess.DEVNULL
        self._leader = subprocess.Popen(
            ["/bin/sh", "-c", LEADER], stdin=subprocess.PIPE, stdout=nowhere, stderr=nowhere, process_group=0
        )

    def __enter__(self) -> Compilers:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end()

    def run(self, command: Sequence[str]) -> subprocess.CompletedProcess[str]:
        """Run a command, whose output may be in any language and encoding, and wait for it.

        Raises:
            InterruptedError: :meth:`end` has already been called.
        """
        with self._lock:
            if self._ended:
                raise InterruptedError("the build has ended")
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                encoding="utf-8",
                errors="backslashreplace",
                process_group=self._leader.pid,
            )
            self._running.add(process)
        try:
            out, err = process.communicate()
        except BaseException:  # a signal, in the main thread
            self.end()
            raise
        finally:
            with self._lock:
                self._running.discard(process)
        return subprocess.CompletedProcess(command, process.returncode, out, err)

    def end(self) -> None:
        """End all running commands; further ones will not start."""
        with self._lock:
            first, self._ended = not self._ended, True
            running = list(self._running)
        if not first:
            return
        if running:
            os.killpg(self._leader.pid, signal.SIGTERM)
        for process in running:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(TIDY)
        os.killpg(self._leader.pid, signal.SIGKILL)
        with self._leader:  # closes the pipe and waits
            pass
