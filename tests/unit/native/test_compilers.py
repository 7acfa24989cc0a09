"""Compilers end with the build they work for, however that ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from opensmd.native.compilers import Compilers, result
from tests.support.patience import PATIENCE

# A driver with a child that does the work, which is what a compiler is.
DRIVER = "echo $$ >> {pids}; (echo $(sh -c 'echo $PPID') >> {pids}; sleep 600; true); true"
BUILD = """
import sys, time
from opensmd.native.compilers import Compilers
builds = [Compilers(), Compilers()]
for compilers in builds:
    compilers.start(["sh", "-c", sys.argv[1]])
time.sleep(600)
"""


def wait_for_pids(file: Path, count: int) -> list[int]:
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline:
        pids = [int(word) for word in file.read_text().split()] if file.exists() else []
        if len(pids) == count:
            return pids
        time.sleep(0.02)
    raise AssertionError(f"{count} processes did not start")


def wait_until_gone(pids: list[int]) -> list[int]:
    deadline = time.monotonic() + PATIENCE
    while (left := [pid for pid in pids if lives(pid)]) and time.monotonic() < deadline:
        time.sleep(0.02)
    return left


def lives(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def test_a_command_is_run_and_its_words_are_kept() -> None:
    with Compilers() as compilers:
        done = compilers.run(["sh", "-c", "echo out; echo err >&2; exit 3"])
    assert (done.returncode, done.stdout, done.stderr) == (3, "out\n", "err\n")


def test_the_end_reaches_the_children_of_those_that_run(tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    with Compilers() as compilers:
        process = compilers.start(["sh", "-c", DRIVER.format(pids=pids)])
        running = wait_for_pids(pids, 2)
        assert result(process) is None
    assert wait_until_gone(running) == []


class StoppedError(Exception):
    """What the handler of a signal raises."""


@pytest.fixture
def raising_handler() -> Iterator[signal.Signals]:
    """A signal whose handler raises, but which does not interrupt what the main thread waits for."""

    def stop(*_: object) -> None:
        raise StoppedError

    number = signal.SIGUSR1
    before = signal.signal(number, stop)
    yield number
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [number])
    signal.signal(number, before)


def test_a_signal_that_comes_just_before_a_wait_ends_it(raising_handler: signal.Signals) -> None:
    """Python only notes it then, as it does when another thread gets it."""
    sender = threading.Timer(0.1, os.kill, (os.getpid(), raising_handler))
    sender.start()
    signal.pthread_sigmask(signal.SIG_BLOCK, [raising_handler])
    with pytest.raises(StoppedError), Compilers() as compilers:
        compilers.run(["sleep", "600"])
    sender.join()


@pytest.mark.processes
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_they_end_when_the_process_that_builds_is_gone(tmp_path: Path, number: signal.Signals) -> None:
    pids = tmp_path / "pids"
    build = subprocess.Popen([sys.executable, "-c", BUILD, DRIVER.format(pids=pids)])
    running = wait_for_pids(pids, 4)
    leaders = psutil.Process(build.pid).children()
    build.send_signal(number)
    build.wait(PATIENCE)
    assert wait_until_gone([*running, *(leader.pid for leader in leaders)]) == []
