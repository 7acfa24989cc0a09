"""What a host's smdrun learns about the others through their store: who restarts, and who has ended.

All hosts restart their ranks together and number the attempts alike, because ranks of different attempts
cannot meet. If a host's ranks do not notice that another's failed (they wait for nobody, or forever), it ends
them, so that its agent sees failed ranks like the others.
"""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Callable
from datetime import timedelta

import torch.distributed as dist
from torch._C._distributed_c10d import Store
from torch.distributed.elastic.rendezvous import RendezvousClosedError

__all__ = ["OtherHosts"]

PATIENCE = 5.0  # seconds for ranks to notice and report a failure on another host
ASK_EVERY = 0.05  # seconds
ONE_MOMENT = timedelta(seconds=5)
_ENDED = "smdrun/ended"
_FINISHED = "torchelastic/agent/terminal_state/num_members"  # counts agents that wait for others to finish


class OtherHosts:
    """The other hosts of a job.

    Args:
        count: the number of hosts, including this one.
        signal_ranks: sends this host's ranks a signal.
    """

    def __init__(self, count: int, signal_ranks: Callable[[int], None]) -> None:
        self._count, self._signal_ranks = count, signal_ranks
        self._store: Store | None = None
        self._attempt = 0
        self._noticed: float | None = None
        self.ended_our_ranks = False

    def meet(self, store: Store, timeout: timedelta) -> None:
        """Wait until all hosts start this attempt.

        Raises:
            RendezvousClosedError: another host has ended, or its ranks have finished.
            DistError: another host did not come in time, or the store's host is gone.
        """
        self._store, self._noticed, self.ended_our_ranks = store, None, False
        key = f"smdrun/attempt-{self._attempt}"
        self._attempt += 1
        arrived, deadline = store.add(key, 1), time.monotonic() + timeout.total_seconds()
        while arrived < self._count:
            if store.check([_ENDED]):
                raise RendezvousClosedError("the smdrun of another host has ended: see its output")
            if store.add(_FINISHED, 0):
                raise RendezvousClosedError("ranks of another host have ended, so none can start again")
            if time.monotonic() > deadline:
                raise dist.DistStoreError(f"only {arrived} of {self._count} hosts came to start the ranks")
            time.sleep(ASK_EVERY)
            arrived = store.add(key, 0)

    def look(self) -> None:
        """End this host's ranks if another host's have failed and these did not notice in time."""
        if not self._others_failed():
            return
        now = time.monotonic()
        self._noticed = self._noticed or now
        waited = now - self._noticed
        if waited > PATIENCE and not self.ended_our_ranks:
            self.ended_our_ranks = True
            self._signal_ranks(signal.SIGTERM)
        elif waited > 2 * PATIENCE:
            self._signal_ranks(signal.SIGKILL)

    def say_that_this_has_ended(self) -> None:
        """Tell the others that this host will start no more ranks."""
        if self._store is not None:
            with contextlib.suppress(dist.DistError):  # the store's host is gone
                self._store.set_timeout(ONE_MOMENT)
                self._store.set(_ENDED, "1")

    def one_has_ended(self) -> bool:
        """Whether another host will start no more ranks."""
        return self._store is not None and self._store.check([_ENDED])

    def _others_failed(self) -> bool:
        if self._store is None:
            return False
        try:
            return self.one_has_ended() or bool(self._store.add(f"smdrun/attempt-{self._attempt}", 0))
        except dist.DistError:  # the store's host is gone
            return True
