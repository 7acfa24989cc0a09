"""Processes forked from one that has imported torch, because importing it costs every process seconds.

Python's fork server is that one: it starts at first use, imports what is named here, and serves the session.
Its children share what an interpreter chooses when it starts, above all the order of sets of strings; and
what the C library reads from the environment at a process's start they cannot be given.
"""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

__all__ = ["ForkedProcess", "as_main", "preload_also"]

# smdistributed is not among them: its import sets variables that depend on the rank. What it is made of sets
# none.
# torch imports torch._dynamo when the first optimizer is made, which takes as long as torch itself.
PRELOADED = [
    "torch",
    "torch.distributed",
    "torch.nn.parallel.distributed",
    "torch._dynamo",
    "opensmd.collectives.backend",
    "opensmd.modelparallel.checkpoint.folder",
    "opensmd.modelparallel.model",
    "opensmd.modelparallel.optimizer",
    "opensmd.modelparallel.step",
    "pytest",
    "psutil",
]
SERVER = multiprocessing.get_context("forkserver")
SERVER.set_forkserver_preload(PRELOADED)


def preload_also(*modules: str) -> None:
    """Import these in the server, too, if they are installed; said before the first process is started."""
    SERVER.set_forkserver_preload([*PRELOADED, *modules])


class ForkedProcess:
    """A process that runs one importable function, with the part of ``Popen``'s methods that tests use."""

    def __init__(
        self,
        function: Callable[..., Any],
        *args: Any,
        cwd: Path,
        env: Mapping[str, str],
        stderr: Path,
        stdout: Path | None = None,
    ) -> None:
        files = {2: stderr} if stdout is None else {1: stdout, 2: stderr}
        self._process = SERVER.Process(target=_begin, args=(function, args, cwd, dict(env), files))
        self._process.start()
        assert self._process.pid is not None
        self.pid = self._process.pid

    def poll(self) -> int | None:
        """The exit code, negative for a signal; None while the process lives."""
        return self._process.exitcode

    @property
    def returncode(self) -> int | None:
        """As :meth:`poll`."""
        return self.poll()

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the end; return the exit code.

        Raises:
            subprocess.TimeoutExpired: the process lives after ``timeout`` seconds.
        """
        self._process.join(timeout)
        code = self._process.exitcode
        if code is None:
            raise subprocess.TimeoutExpired("a forked process", timeout or 0.0)
        return code

    def send_signal(self, number: int) -> None:
        """Send a signal, if the process lives."""
        # The fork server may have seen its end before we are told.
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def kill(self) -> None:
        """End the process at once."""
        self.send_signal(signal.SIGKILL)


def as_main(script: str, arguments: Sequence[str]) -> None:
    """Run a script's file, or the module of this name, as if an interpreter had been started for it.

    The process is the first of a session of its own.
    """
    os.setsid()
    sys.argv = [script, *arguments]
    if script.endswith(".py"):
        sys.path.insert(0, str(Path(script).parent))
        runpy.run_path(script, run_name="__main__")
    else:
        runpy.run_module(script, run_name="__main__", alter_sys=True)


def _begin(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    cwd: Path,
    env: dict[str, str],
    files: dict[int, Path],
) -> None:
    """In the new process: leave what the fork server was given, then do what is asked."""
    gc.freeze()  # what the server has imported lives as long as this process: collections leave it alone
    for descriptor, path in files.items():
        with path.open("wb") as file:
            os.dup2(file.fileno(), descriptor)
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(env)
    function(*args)
