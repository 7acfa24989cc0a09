"""The thread of background saves.

A daemon, unlike those of ``concurrent.futures``: the interpreter waits for those before it calls ``atexit``
functions, so nothing could tell a save to hurry once its script has ended.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue

__all__ = ["SavingThread"]

NAME = "smp.save_checkpoint"


class SavingThread:
    """Runs submitted work in order.

    Args:
        begin: called first, in the thread.
    """

    def __init__(self, begin: Callable[[], object]) -> None:
        self._work: SimpleQueue[tuple[Future[None], Callable[[], None]] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, args=(begin,), name=NAME, daemon=True)
        self._thread.start()

    def submit(self, work: Callable[[], None]) -> Future[None]:
        """Run ``work`` after everything submitted before."""
        future: Future[None] = Future()
        self._work.put((future, work))
        return future

    def end(self) -> None:
        """Wait until everything is done and the thread has ended."""
        self._work.put(None)
        self._thread.join()

    def _run(self, begin: Callable[[], object]) -> None:
        begin()
        while (submitted := self._work.get()) is not None:
            future, work = submitted
            try:
                work()
            except BaseException as error:
                future.set_exception(error)
            else:
                future.set_result(None)
            del submitted, future, work  # they hold copies of the model
