"""Jobs whose launcher is a fork of a process that has imported torch, and whose ranks are its forks.

What a launcher and its ranks do is what they do for users; only starting the interpreters and importing
torch, which take each of them seconds, are left out. So each launcher and each kind of script is started as
users start it by a test of its own, and what else is asked of it is asked of forks. Not for tests of what a
process has from its very start: its command line and environment as others see them, or what the C library
reads.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from tests.support.forks import ForkedProcess
from tests.support.patience import PATIENCE

__all__ = ["run_job"]

# The modules behind the commands that pip installs.
COMMANDS = {"smdrun": "opensmd.launch.cli", "torchrun": "torch.distributed.run"}
_STANDARD = 3  # descriptors 0, 1 and 2


def run_job(
    command: Sequence[object], *, cwd: Path, env: Mapping[str, str], fork_ranks: bool = True
) -> subprocess.CompletedProcess[str]:
    """Run a launcher to its end, as ``subprocess.run`` does.

    Args:
        command: that of ``smdrun`` or ``torchrun``, or Python's with ``-m`` and the module of a launcher.
        cwd: the folder to start in.
        env: all of its environment.
        fork_ranks: fork the ranks, too.
    """
    words = list(map(str, command))
    name = Path(words[0]).name
    module, arguments = (COMMANDS[name], words[1:]) if name in COMMANDS else (words[2], words[3:])
    with tempfile.TemporaryDirectory(prefix="job-") as folder:
        out, errors = Path(folder) / "out", Path(folder) / "errors"
        job = ForkedProcess(
            _launch, module, arguments, fork_ranks, cwd=cwd, env=env, stdout=out, stderr=errors
        )
        try:
            code = job.wait(PATIENCE)
        finally:
            job.kill()
        texts = [path.read_text(encoding="utf-8", errors="surrogateescape") for path in (out, errors)]
    return subprocess.CompletedProcess(words, code, *texts)


def _launch(module: str, arguments: list[str], fork_ranks: bool) -> None:
    """In the launcher's process."""
    os.setsid()
    # What the fork server was started with is not what is asked of the job.
    sys.dont_write_bytecode = "PYTHONDONTWRITEBYTECODE" in os.environ
    if fork_ranks:
        subprocess.Popen = ForkedInterpreter  # type: ignore[misc]
        from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler

        subprocess_handler.Popen = ForkedInterpreter  # type: ignore[misc]
    _run_as_main(["-m", module, *arguments])


class ForkedInterpreter(subprocess.Popen):  # type: ignore[type-arg]
    """A process of ``python -u`` as a fork of this one; any other command is started as usual."""

    def _execute_child(
        self,
        args: Sequence[str],
        executable: Any,
        preexec_fn: Any,
        close_fds: bool,
        pass_fds: Any,
        cwd: Any,
        env: Mapping[str, str] | None,
        startupinfo: Any,
        creationflags: Any,
        shell: bool,
        p2cread: int,
        p2cwrite: int,
        c2pread: int,
        c2pwrite: int,
        errread: int,
        errwrite: int,
        restore_signals: bool,
        *identity: Any,
    ) -> None:
        words = [] if isinstance(args, str) else list(map(str, args))
        if words[:2] != [sys.executable, "-u"] or p2cread != -1 or cwd is not None:
            start: Any = super()
            start._execute_child(
                args,
                executable,
                preexec_fn,
                close_fds,
                pass_fds,
                cwd,
                env,
                startupinfo,
                creationflags,
                shell,
                p2cread,
                p2cwrite,
                c2pread,
                c2pwrite,
                errread,
                errwrite,
                restore_signals,
                *identity,
            )
            return
        sys.stdout.flush()
        sys.stderr.flush()
        self.pid = os.fork()
        self._child_created = True
        if self.pid == 0:
            _begin(words[2:], dict(os.environ if env is None else env), {1: c2pwrite, 2: errwrite})


def _begin(words: list[str], env: dict[str, str], streams: Mapping[int, int]) -> None:
    """In the new process: leave what the launcher had, then be an interpreter, and end."""
    code = 1
    try:
        _leave_launcher(streams)
        os.environ.clear()
        os.environ.update(env)
        import torch

        torch.set_num_threads(int(env.get("OMP_NUM_THREADS", torch.get_num_threads())))
        _run_as_main(words)
        code = 0
    except SystemExit as leaving:
        code = _code_of(leaving)
    except BaseException:
        sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
    finally:
        with contextlib.suppress(BaseException):
            threading._shutdown()  # type: ignore[attr-defined]
            atexit._run_exitfuncs()
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):
                stream.flush()
        os._exit(code)


def _leave_launcher(streams: Mapping[int, int]) -> None:
    os.setsid()
    gc.freeze()
    atexit._clear()
    signal.set_wakeup_fd(-1)
    for number in signal.valid_signals():
        if callable(signal.getsignal(number)) or number in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM):
            usual = signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
            signal.signal(number, usual)
    for descriptor, source in streams.items():
        if source != -1:
            os.dup2(source, descriptor)
    for name in os.listdir("/dev/fd"):  # noqa: PTH208 - names alone
        if int(name) >= _STANDARD:
            with contextlib.suppress(OSError):  # of the listing itself
                os.close(int(name))
    sys.stdout, sys.stderr = (_stream(number) for number in (1, 2))


def _stream(descriptor: int) -> IO[str]:
    """As ``python -u`` has it."""
    return open(descriptor, "w", encoding="utf-8", errors="backslashreplace", buffering=1, closefd=False)


def _run_as_main(words: Sequence[str]) -> None:
    """Run the module after ``-m``, or the script, with the words behind it as arguments."""
    if words[0] == "-m":
        sys.path.insert(0, str(Path.cwd()))
        sys.argv = list(words[1:])
        sys.modules.pop(words[1], None)  # an interpreter would not have imported it before
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    else:
        sys.path.insert(0, str(Path(words[0]).resolve().parent))
        sys.argv = list(words)
        runpy.run_path(words[0], run_name="__main__")


def _code_of(leaving: SystemExit) -> int:
    if leaving.code is None or isinstance(leaving.code, int):
        return leaving.code or 0
    print(leaving.code, file=sys.stderr)
    return 1
