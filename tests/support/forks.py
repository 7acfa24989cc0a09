"""Processes forked from one that has imported torch, because importing it costs every process seconds.

Python's fork server is that one: it starts at first use, imports what is named here, and serves the session.
Its children share what an interpreter chooses when it starts, above all the order of sets of strings; and
what the C library reads from the environment at a process's start they cannot be given.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from subprocess import PIPE
from typing import IO, Any

from tests.support.jobs import both
from tests.support.namespaces import enter_network

__all__ = ["ForkedProcess", "as_main", "choose_anew", "preload_also", "text_stream"]

# smdistributed is not among them: its import sets variables that depend on the rank. What it is made of sets
# none.
# torch imports torch._dynamo when the first optimizer is made, which takes as long as torch itself. Its
# distributed optimizers are compiled when they are imported.
PRELOADED = [
    "torch",
    "torch.distributed",
    "torch.distributed.algorithms.ddp_comm_hooks.default_hooks",
    "torch.distributed.optim",
    "torch.nn.parallel.distributed",
    "torch._dynamo",
    "opensmd.collectives.backend",
    "opensmd.launch.cli",
    "opensmd.modelparallel.checkpoint.save_folder",
    "opensmd.modelparallel.communicate",
    "opensmd.modelparallel.delayed.contexts",
    "opensmd.modelparallel.elastic.steps",
    "opensmd.modelparallel.init",
    "opensmd.modelparallel.model",
    "opensmd.modelparallel.optimizer",
    "opensmd.modelparallel.precision.grad_scaler",
    "opensmd.modelparallel.step",
    "opensmd.modelparallel.tensor_parallel.huggingface.bert",
    "opensmd.modelparallel.tensor_parallel.huggingface.gpt2",
    "opensmd.modelparallel.tensor_parallel.huggingface.gptj",
    "opensmd.modelparallel.tensor_parallel.huggingface.gptneo",
    "opensmd.modelparallel.tensor_parallel.huggingface.roberta",
    "opensmd.modelparallel.tensor_parallel.random",
    "opensmd.modelparallel.world",
    "pytest",
    "psutil",
]
FIRST, LAST = "tests.support.resting_collector", "tests.support.large_pages"
SERVER = multiprocessing.get_context("forkserver")
SERVER.set_forkserver_preload([FIRST, *PRELOADED, LAST])


def preload_also(*modules: str) -> None:
    """Import these in the server, too, if they are installed; said before the first process is started."""
    SERVER.set_forkserver_preload([FIRST, *PRELOADED, *modules, LAST])


@atexit.register
def _kill_children() -> None:
    """Python waits at its end for those that a failed test has left behind."""
    for child in multiprocessing.active_children():
        child.kill()


class ForkedProcess:
    """A process that runs one importable function, with the part of ``Popen``'s methods that tests use."""

    def __init__(
        self,
        function: Callable[..., Any],
        *args: Any,
        cwd: Path,
        env: Mapping[str, str],
        stdout: Path | int | None = None,
        stderr: Path | int | None = None,
        network: str | None = None,
    ) -> None:
        """Start it.

        Args:
            function: what it runs.
            args: what that is given.
            cwd: the folder to start in.
            env: all of its environment.
            stdout: the file to write to, or ``subprocess.PIPE``; the default is this process's own.
            stderr: likewise.
            network: the name of the network namespace to start in.
        """
        self.stdout, output = _ends(stdout)
        self.stderr, errors = _ends(stderr)
        begin = (function, args, cwd, dict(env), {1: output, 2: errors}, network)
        self._process = SERVER.Process(target=_begin, args=begin)
        self._process.start()
        for end in (output, errors):
            if isinstance(end, Connection):
                end.close()
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

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """What the process writes to its end, at which it is after ``timeout`` seconds at the latest."""
        assert self.stdout is not None and self.stderr is not None
        stdout, stderr = self.stdout, self.stderr

        def read_to_the_end() -> tuple[str, str]:
            return both(stdout.read, stderr.read)

        def wait() -> None:
            try:
                self.wait(timeout)
            finally:
                self.kill()

        return both(read_to_the_end, wait)[0]

    def send_signal(self, number: int) -> None:
        """Send a signal, if the process lives."""
        # The fork server may have seen its end before we are told.
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def kill(self) -> None:
        """End the process at once."""
        self.send_signal(signal.SIGKILL)


def _ends(target: Path | int | None) -> tuple[IO[str] | None, Path | Connection | None]:
    """The end of a pipe for this process, if one is asked for, and what the new process writes to."""
    if not isinstance(target, int):
        return None, target
    assert target == PIPE
    reader, writer = SERVER.Pipe(duplex=False)
    with reader:
        return os.fdopen(os.dup(reader.fileno()), encoding="utf-8", errors="surrogateescape"), writer


def choose_anew(env: Mapping[str, str]) -> None:
    """Choose what libraries chose in the server as they would in an interpreter with this environment."""
    import numpy
    import torch

    torch.set_num_threads(int(env.get("OMP_NUM_THREADS", torch.get_num_threads())))
    torch.seed()
    numpy.random.seed()
    tempfile.tempdir = None
    multiprocessing.set_start_method(None, force=True)


def text_stream(descriptor: int) -> IO[str]:
    """What ``python -u`` writes to it through."""
    return open(descriptor, "w", encoding="utf-8", errors="backslashreplace", buffering=1, closefd=False)


def as_main(script: str, arguments: Sequence[str]) -> None:
    """Run a script's file, or the module of this name, as if an interpreter had been started for it.

    The process is the first of a session of its own.
    """
    os.setsid()
    sys.argv = [script, *arguments]
    try:
        if script.endswith(".py"):
            sys.path.insert(0, str(Path(script).parent))
            runpy.run_path(script, run_name="__main__")
        else:
            runpy.run_module(script, run_name="__main__", alter_sys=True)
    finally:
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()


def _begin(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    cwd: Path,
    env: dict[str, str],
    streams: dict[int, Path | Connection | None],
    network: str | None,
) -> None:
    """In the new process: leave what the fork server was given, then do what is asked."""
    gc.freeze()  # what the server has imported lives as long as this process: collections leave it alone
    gc.enable()
    atexit.unregister(_kill_children)  # a script waits for those that it starts
    for descriptor, target in streams.items():
        if target is not None:
            with target.open("wb") if isinstance(target, Path) else target as file:
                os.dup2(file.fileno(), descriptor)
    sys.stdout, sys.stderr = (text_stream(descriptor) for descriptor in (1, 2))
    if network is not None:
        enter_network(network)
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(env)
    choose_anew(env)
    function(*args)
