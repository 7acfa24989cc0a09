"""A job whose replicas come and go, for tests: the test itself is what smdrun would be.

Its ranks are forks, which start in a moment. As smdrun does, it ends the other ranks of a replica that has
lost one, and says in the job's store when none is left.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

from opensmd.collectives.stores.listening import LOOPBACK, served_store
from opensmd.collectives.stores.replica_store import JobPlace, Replica, ReplicaStore
from tests.support.patience import PATIENCE
from tests.support.ranks import Outcome, Ranks

__all__ = ["ReplicasOfTest", "replicas_of"]

Function = Callable[..., Any]  # takes the variables of its rank first


class ReplicasOfTest:
    """Starts replicas and looks after them.

    Attributes:
        store: of the job.
    """

    def __init__(self, replicas: int, size: int) -> None:
        self._replicas, self._size = replicas, size
        self._served = served_store(LOOPBACK, 0, None, timeout=timedelta(seconds=PATIENCE))
        self.store = ReplicaStore(self._served)
        self._started: dict[Replica, Ranks] = {}
        self._watched: list[threading.Thread] = []
        self._attempts = [0] * replicas
        self.closing = False

    def start(self, number: int, function: Function, *args: Any) -> Replica:
        """Start a replica, or start it again."""
        replica = Replica(number, self._attempts[number])
        self._attempts[number] += 1
        ranks = self._started[replica] = Ranks(self._size, forked=self._size)
        arguments = [
            (self._place(replica, rank).variables(), replica.attempt, *args) for rank in range(self._size)
        ]
        ranks.call(function, arguments, backend=None, timeout=PATIENCE, group_timeout=PATIENCE)
        thread = threading.Thread(target=self._watch, args=(replica, ranks), daemon=True)
        thread.start()
        self._watched.append(thread)
        return replica

    def answers(self, replica: Replica) -> list[Outcome]:
        """What became of the ranks of a replica."""
        return self._started[replica].answers()

    def values(self, replica: Replica) -> list[Any]:
        """What its ranks have returned."""
        answers = self.answers(replica)
        assert all(answer.kind == "value" for answer in answers), "\n".join(
            f"{answer}\n{answer.text}" for answer in answers
        )
        return [answer.value for answer in answers]

    def wait_for_end(self, replica: Replica) -> None:
        """Wait until no process of it is left."""
        end = time.monotonic() + PATIENCE
        while not self.store.has_ended(replica):
            assert time.monotonic() < end
            time.sleep(0.01)

    def started(self, number: int) -> list[Replica]:
        """The starts of a replica, earliest first."""
        return [replica for replica in self._started if replica.number == number]

    def pids(self, replica: Replica) -> list[int]:
        """The process ids of its ranks."""
        return self._started[replica].pids

    def close(self) -> None:
        """End all that is left."""
        self.closing = True
        for thread in self._watched:
            thread.join()
        for ranks in self._started.values():
            ranks.close(kill=True)

    def _place(self, replica: Replica, rank: int) -> JobPlace:
        local = replica.number * self._size + rank
        address = f"{LOOPBACK}:{self._served.port}"
        return JobPlace(
            address, replica, self._replicas, rank, self._size, local, self._replicas * self._size
        )

    def _watch(self, replica: Replica, ranks: Ranks) -> None:
        while not self.closing:
            if any(process.poll() is not None for process in ranks._processes):
                for process in ranks._processes:
                    process.kill()
                    process.wait(PATIENCE)
                self.store.attempt_has_ended(replica.number)
                return
            time.sleep(0.02)


@contextmanager
def replicas_of(replicas: int, size: int) -> Iterator[ReplicasOfTest]:
    """A job of so many replicas of so many ranks, none of which is started yet."""
    job = ReplicasOfTest(replicas, size)
    try:
        yield job
    finally:
        job.close()
