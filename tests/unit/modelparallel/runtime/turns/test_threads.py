"""Threads that stay, and end when they are closed."""

from __future__ import annotations

import threading

from opensmd.modelparallel.runtime.turns.threads import Threads
from tests.support.patience import PATIENCE


def run(threads: Threads) -> threading.Thread:
    """The thread of a job that has ended."""
    found: list[threading.Thread] = []
    ended = threading.Event()

    def job() -> None:
        found.append(threading.current_thread())
        ended.set()

    threads.start(job)
    assert ended.wait(PATIENCE)
    return found[0]


def test_jobs_at_the_same_time_have_threads_of_their_own_and_closing_ends_all() -> None:
    threads = Threads()
    together = threading.Barrier(3, timeout=PATIENCE)
    found: list[threading.Thread] = []

    def job() -> None:
        found.append(threading.current_thread())
        together.wait()  # which needs both jobs at once
        together.wait()

    threads.start(job)
    threads.start(job)
    together.wait()
    assert len(set(found)) == 2 and all(thread.daemon for thread in found)
    threads.close()  # while both still work
    together.wait()
    for thread in found:
        thread.join(PATIENCE)
        assert not thread.is_alive()


def test_a_thread_is_used_again() -> None:
    threads = Threads()
    first = run(threads)
    used = {first, *(run(threads) for _ in range(20))}
    # A job may begin before the thread of the one before counts as idle; it is never one thread a job.
    assert len(used) <= 2
    threads.close()
    for thread in used:
        thread.join(PATIENCE)
        assert not thread.is_alive()
