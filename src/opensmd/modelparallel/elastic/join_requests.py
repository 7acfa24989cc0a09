"""The thread on rank 0 that looks for replicas that want to join, in parallel to the steps.

Asking the job's store takes longer than the end of a small step, so no step waits for it.
"""

from __future__ import annotations

import contextlib
import threading

from opensmd.collectives.stores.replica_store import ReplicaStore

__all__ = ["JoinRequests"]

LOOK_EVERY = 0.05  # seconds between two looks


class JoinRequests(threading.Thread):
    """Counts the requests to join until :meth:`stop`.

    Args:
        address: of the job's store; it gets its own client, because another may be blocked in a wait.

    Attributes:
        number: the requests seen so far.
    """

    def __init__(self, address: str) -> None:
        super().__init__(name="smp-requests-to-join", daemon=True)
        self.number = 0
        self._address = address
        self._ended = threading.Event()
        self.start()

    def run(self) -> None:
        """Look until :meth:`stop` is called."""
        with contextlib.suppress(RuntimeError):  # smdrun is gone, and soon this process, too
            store = ReplicaStore.at(self._address)
            while not self._ended.wait(LOOK_EVERY):
                self.number = store.requests()

    def stop(self) -> None:
        """Stop looking."""
        self._ended.set()
        self.join()
