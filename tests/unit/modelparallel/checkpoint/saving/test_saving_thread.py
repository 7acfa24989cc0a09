"""The thread of background saves: it does one thing after the other, and a script that ends may hurry it."""

from __future__ import annotations

import os
import subprocess
import sys
import threading

import pytest

from opensmd.modelparallel.checkpoint.saving.saving_thread import SavingThread
from tests.support.patience import PATIENCE

ENDS = f"""
import atexit, threading
from opensmd.modelparallel.checkpoint.saving.saving_thread import SavingThread

hurried = threading.Event()
saved = SavingThread(lambda: None).submit(lambda: print("hurried:", hurried.wait({PATIENCE / 2})))

def finish():
    hurried.set()
    saved.result()

atexit.register(finish)
"""


def test_work_is_done_in_turn_in_one_thread_and_its_errors_are_kept() -> None:
    done: list[tuple[str, int]] = []

    def note(what: str) -> None:
        done.append((what, threading.get_ident()))

    def fail() -> None:
        raise OSError("full")

    thread = SavingThread(lambda: note("begin"))
    first, failed, last = (
        thread.submit(each) for each in (lambda: note("first"), fail, lambda: note("last"))
    )
    thread.end()
    assert [what for what, _ in done] == ["begin", "first", "last"]
    assert len({ident for _, ident in done} - {threading.get_ident()}) == 1
    assert first.result() is None and last.result() is None and isinstance(failed.exception(), OSError)


@pytest.mark.processes
def test_what_a_script_has_registered_for_its_end_may_hurry_the_thread() -> None:
    command = [sys.executable, "-c", ENDS]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=PATIENCE, env=os.environ, check=False
    )
    assert (done.stdout, done.returncode) == ("hurried: True\n", 0), done.stderr
