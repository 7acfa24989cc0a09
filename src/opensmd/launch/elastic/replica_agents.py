"""An agent of torch's for each replica: one whose rank dies ends and restarts its own ranks, and no others.

The agents run in threads of smdrun. Each says in the job's store when an attempt of its replica has ended,
which is when no process of it is left, so that the others need not wait for it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from datetime import timedelta

from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.elastic.rendezvous import RendezvousClosedError

from opensmd.collectives.stores.listening import LOOPBACK, served_store
from opensmd.collectives.stores.replica_store import FINISHED, JobPlace, Replica, ReplicaStore
from opensmd.launch.output.console import Console
from opensmd.launch.output.logs import Place

__all__ = ["JobEndedByRanksError", "Launch", "ReplicaAgents"]

TIMEOUT = timedelta(seconds=60)
LOOK_EVERY = 0.05  # seconds

# Runs one replica's agent to its end, given what to call before each attempt, and what places its ranks.
Launch = Callable[[Callable[[], None], Place], None]


class JobEndedByRanksError(RuntimeError):
    """The ranks have found that the job cannot go on."""


class ReplicaAgents:
    """Runs the replicas of a job, and says what becomes of them.

    Args:
        replicas: how many.
        size: ranks of each.
        max_restarts: of each.
        launch: runs one.
        console: for what becomes of them.
    """

    def __init__(self, replicas: int, size: int, max_restarts: int, launch: Launch, console: Console) -> None:
        self._replicas, self._size, self._max_restarts = replicas, size, max_restarts
        self._launch, self._console = launch, console
        self._served = served_store(LOOPBACK, 0, None, timeout=TIMEOUT, wait_for_workers=False)
        self._store = ReplicaStore(self._served)
        self._attempts = [0] * replicas
        self._failures: dict[int, dict[int, ProcessFailure]] = {}  # of replicas that have ended badly
        self._errors: list[BaseException] = []
        self._ended = 0

    def run(self) -> dict[int, ProcessFailure]:
        """Run all to their end.

        Returns:
            The failures of ranks, if no replica has come to its end.

        Raises:
            JobEndedByRanksError: they have found that it cannot go on.
            BaseException: what a signal's handler has raised here, or an agent.
        """
        threads = [
            threading.Thread(target=self._run_one, args=(number,), name=f"replica-{number}", daemon=True)
            for number in range(self._replicas)
        ]
        for thread in threads:
            thread.start()
        try:
            while any(thread.is_alive() for thread in threads):
                time.sleep(LOOK_EVERY)
        except BaseException:
            self._store.end("smdrun was ended")
            raise
        if self._store.over:
            raise JobEndedByRanksError(self._store.over)
        if self._store.over == FINISHED:
            return {}
        if self._errors:
            raise self._errors[0]
        return {rank: failure for each in self._failures.values() for rank, failure in each.items()}

    def _run_one(self, number: int) -> None:
        first = number * self._size
        try:
            self._launch(lambda: self._before_attempt(number), self._placing(number))
            self._store.end(FINISHED)
        except ChildFailedError as error:
            self._failures[number] = {first + rank: each for rank, each in error.failures.items()}
        except BaseException as error:  # a thread has nobody above it
            self._errors.append(error)
        self._ended += 1
        if number in self._failures and self._store.over is None and self._ended < self._replicas:
            self._console.say(f"{self._name(number)} has ended for good; the others go on without it")
        self._store.attempt_has_ended(number)

    def _before_attempt(self, number: int) -> None:
        """Said once more for each restart, which comes when no process of the last attempt is left."""
        attempt = self._attempts[number]
        self._attempts[number] += 1
        if attempt == 0:
            return
        if self._store.over is not None:
            raise RendezvousClosedError("the job is over")
        self._store.attempt_has_ended(number)
        self._console.say(f"{self._name(number)} has ended; restart {attempt} of {self._max_restarts}")

    def _placing(self, number: int) -> Place:
        def place(env: dict[str, str], rank: int) -> None:
            attempt = int(env["TORCHELASTIC_RESTART_COUNT"])
            found = JobPlace(
                f"{LOOPBACK}:{self._served.port}",
                Replica(number, attempt),
                self._replicas,
                rank,
                self._size,
                number * self._size + rank,
                self._replicas * self._size,
            )
            env.update(found.variables())

        return place

    def _name(self, number: int) -> str:
        first = number * self._size
        ranks = ", ".join(map(str, range(first, first + self._size)))
        return f"replica {number} (rank{'s' * (self._size > 1)} {ranks})"
