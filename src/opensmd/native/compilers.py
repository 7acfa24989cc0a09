"""Running compilers in parallel, without letting them outlive their build.

A compiler is a driver whose children do the work, and neither it nor the kernel ends them when it dies. So
all are in one process group, led by a shell that reads from a pipe of ours: if the pipe ends, this process is
gone, however it ended, and the shell ends its group.

No threads wait for them: a signal handler that raises while the main thread holds a lock of theirs, or just
before it waits for one, would leave all waiting.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Sequence
from types import TracebackType

__all__ = ["LOOK_EVERY", "Compilers", "result"]

# At SIGTERM a compiler removes its temporary files; the leader itself has to survive the signal.
LEADER = "trap '' TERM INT HUP; read word; kill -TERM 0; sleep 1; kill -KILL 0"
TIDY = 1.0  # seconds for removing them
LOOK_EVERY = 0.05  # seconds


class Compilers:
    """Runs commands until the end of its ``with`` block, which ends those that still run."""

    def __init__(self) -> None:
        self._started: list[subprocess.Popen[str]] = []
        nowhere = subprocess.DEVNULL
        self._leader = subprocess.Popen(
            ["/bin/sh", "-c", LEADER], stdin=subprocess.PIPE, stdout=nowhere, stderr=nowhere, process_group=0
        )

    def __enter__(self) -> Compilers:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        running = [process for process in self._started if process.poll() is None]
        if running:
            os.killpg(self._leader.pid, signal.SIGTERM)
        for process in running:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(TIDY)
        os.killpg(self._leader.pid, signal.SIGKILL)
        with self._leader:  # closes the pipe and waits
            pass

    def start(self, command: Sequence[str]) -> subprocess.Popen[str]:
        """Start a command, whose output may be in any language and encoding; see :func:`result`."""
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            encoding="utf-8",
            errors="backslashreplace",
            process_group=self._leader.pid,
        )
        self._started.append(process)
        return process

    def run(self, command: Sequence[str]) -> subprocess.CompletedProcess[str]:
        """Run a command to its end."""
        process = self.start(command)
        while (done := result(process)) is None:
            pass
        return done


def result(process: subprocess.Popen[str]) -> subprocess.CompletedProcess[str] | None:
    """Wait for a command, but only for a moment; return what it has come to if it has ended.

    Python calls no handler for a signal that comes just before a wait until that wait is over.
    """
    try:
        out, err = process.communicate(timeout=LOOK_EVERY)
    except subprocess.TimeoutExpired:
        return None
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)
