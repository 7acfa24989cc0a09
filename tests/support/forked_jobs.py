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
import shlex
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from multiprocessing import resource_tracker
from pathlib import Path
from subprocess import PIPE
from typing import Any

from tests.support import ssh
from tests.support.forks import ForkedProcess, choose_anew, text_stream
from tests.support.namespaces import enter_network
from tests.support.patience import PATIENCE

__all__ = ["run_job", "start_job"]

# The modules behind the commands that pip installs.
COMMANDS = {"smdrun": "opensmd.launch.cli", "torchrun": "torch.distributed.run"}
_STANDARD = 3  # descriptors 0, 1 and 2


def start_job(
    command: Sequence[object],
    *,
    cwd: Path,
    env: Mapping[str, str],
    fork_ranks: bool = True,
    network: str | None = None,
    stderr: Path | int = PIPE,
) -> ForkedProcess:
    """Start a launcher, as ``subprocess.Popen`` does, with a pipe for what it writes.

    Args:
        command: that of ``smdrun`` or ``torchrun``, or Python's with ``-m`` and the module of a launcher.
        cwd: the folder to start in.
        env: all of its environment.
        fork_ranks: fork the ranks, too.
        network: the name of the network namespace to start in.
        stderr: the file for its errors; the default is a pipe, too.
    """
    words = list(map(str, command))
    name = Path(words[0]).name
    module, arguments = (COMMANDS[name], words[1:]) if name in COMMANDS else (words[2], words[3:])
    launch = (_launch, module, arguments, fork_ranks)
    return ForkedProcess(*launch, cwd=cwd, env=env, stdout=PIPE, stderr=stderr, network=network)


def run_job(command: Sequence[object], **options: Any) -> subprocess.CompletedProcess[str]:
    """Run a launcher to its end, as ``subprocess.run`` does, with the options of :func:`start_job`."""
    job = start_job(command, **options)
    texts = job.communicate(PATIENCE)
    return subprocess.CompletedProcess(list(map(str, command)), job.wait(), *texts)


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
    """A fork of this process for ``python -u``, and for what the stand-in for ssh would start on a host.

    Any other command is started as usual.
    """

    def __init__(
        self, args: Sequence[str] | str, *, env: Mapping[str, str] | None = None, **options: Any
    ) -> None:
        words = [] if isinstance(args, str) else list(map(str, args))
        main = _main_of(words)
        if main is None:
            super().__init__(args, env=env, **options)
            return
        sys.stdout.flush()
        sys.stderr.flush()
        # The new process has its folder, its session and its streams when this is called, which does not
        # return: there is nothing left to execute.
        begin = partial(_begin, main, dict(os.environ if env is None else env))
        super().__init__(words, env=env, preexec_fn=begin, **options)


def _main_of(words: list[str]) -> Callable[[], None] | None:
    """What the process of a command does, if a fork does it."""
    if words[:2] == [sys.executable, "-u"]:
        return partial(_run_as_main, words[2:])
    if words[:3] == [sys.executable, "-S", ssh.__file__]:
        return partial(_run_on_host, *words[3:])
    return None


def _begin(main: Callable[[], None], env: dict[str, str]) -> None:
    """In the new process: leave what the launcher had, then be an interpreter, and end."""
    code = 1
    try:
        _leave_launcher()
        os.environ.clear()
        os.environ.update(env)
        choose_anew(env)
        main()
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


def _leave_launcher() -> None:
    gc.freeze()
    gc.enable()  # which it is not until a usual process has been started
    atexit._clear()
    signal.set_wakeup_fd(-1)
    for number in signal.valid_signals():
        if callable(signal.getsignal(number)) or number in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM):
            usual = signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
            signal.signal(number, usual)
    for number in (signal.SIGPIPE, signal.SIGXFSZ):  # an interpreter ignores them, and Popen resets them
        signal.signal(number, signal.SIG_IGN)
    tracker = resource_tracker.getfd()  # which this process has, too, if it uses multiprocessing
    for name in os.listdir("/dev/fd"):  # noqa: PTH208 - names alone
        if int(name) >= _STANDARD and int(name) != tracker:
            with contextlib.suppress(OSError):  # of the listing itself
                os.close(int(name))
    sys.stdout, sys.stderr = (text_stream(number) for number in (1, 2))


def _run_on_host(host: str, line: str) -> None:
    """Run a line of the shape ``cd FOLDER && [NAME=VALUE] exec PYTHON -m MODULE ...`` as its interpreter."""
    namespace = ssh.namespace_of(host)
    if namespace is not None:
        enter_network(namespace)
    os.environ["OPENSMD_HOST_ID"] = host
    before, _, command = line.partition(" exec ")
    os.chdir(shlex.split(before)[1])
    _run_as_main(shlex.split(command)[1:])


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
