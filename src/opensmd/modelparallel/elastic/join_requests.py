"""The thread of rank 0 that looks for replicas that want to join, beside the steps.

Asking the job's store takes longer than the end of a small step, so no step waits for it.
"""

from __future__ import annotations

import contextlib
import threading

from opensmd.collectives.stores.replica_store import ReplicaStore

__all__ = ["JoinRequests"]

LOOK_EVERY = 0.05  # seconds between two looks


class JoinRequests(threading.Thread):
    """Counts the requests to join, from its making until :meth:`stop`.

    Args:
        address: of the job's store, to which it makes a client of its own: another may be waiting.

    Attributes:
        number: of the requests seen so far.
    """

    def __init__(self, address: str) -> None:
        super().__init__(name="smp-requests-to-join", daemon=True)
        self.number = 0
        self._address = address
        self._ended = threading.Event()
        self.start()

    def run(self) -> None:
        """Look until :meth:`stop` is called."""
        with contextlib.suppress(RuntimeError):  # smdrun is gone, and this process with it
            store = ReplicaStore.at(self._address)
            while not self._ended.wait(LOOK_EVERY):
                self.number = store.requests()

    def stop(self) -> None:
        """Look no more."""
        self._ended.set()
        self.join()
