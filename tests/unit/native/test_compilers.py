"""Compilers end with the build they work for, however that ends."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest

from opensmd.native.compilers import Compilers
from tests.support.patience import PATIENCE

# A driver with a child that does the work, which is what a compiler is.
DRIVER = "echo $$ >> {pids}; (echo $(sh -c 'echo $PPID') >> {pids}; sleep 600; true); true"
BUILD = """
import sys, threading
from opensmd.native.compilers import Compilers
threads = [threading.Thread(target=Compilers().run, args=(["sh", "-c", sys.argv[1]],)) for _ in range(2)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
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
    compilers = Compilers()
    thread = threading.Thread(target=compilers.run, args=(["sh", "-c", DRIVER.format(pids=pids)],))
    thread.start()
    running = wait_for_pids(pids, 2)
    compilers.end()
    thread.join()
    assert wait_until_gone(running) == []
    with pytest.raises(InterruptedError, match="the build has ended"):
        compilers.run(["true"])


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
