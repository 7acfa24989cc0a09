"""One torch agent per replica: when a rank dies, only its replica's ranks are ended and restarted.

The agents of a host's replicas run in threads of its smdrun. When an attempt of its replica has ended and
none of its processes is left, an agent says so in the job's store, so that the others need not wait for it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.elastic.rendezvous import RendezvousClosedError

from opensmd.collectives.stores.replica_store import FINISHED, JobPlace, Replica, ReplicaStore
from opensmd.launch.elastic.hosts_of_replicas import HostPlace, HostsOfReplicas
from opensmd.launch.output.console import Console
from opensmd.launch.output.logs import Place

__all__ = ["JobEndedByRanksError", "Launch", "ReplicaAgents"]

LOOK_EVERY = 0.05  # seconds

# Runs one replica's agent, given what to call before each attempt, and what places its ranks.
Launch = Callable[[Callable[[], None], Place], None]


class JobEndedByRanksError(RuntimeError):
    """The ranks have found that the job cannot continue."""


class ReplicaAgents:
    """Runs this host's replicas of a job, and reports what becomes of them.

    Args:
        replicas: the number of replicas on all hosts, which have equal shares.
        size: ranks per replica.
        max_restarts: per replica.
        launch: runs one replica.
        console: for reports on the replicas.
        host: this host.

    Raises:
        DistError: host 0 is not reached in time.
    """

    def __init__(
        self,
        replicas: int,
        size: int,
        max_restarts: int,
        launch: Launch,
        console: Console,
        host: HostPlace,
    ) -> None:
        self._replicas, self._size, self._max_restarts = replicas, size, max_restarts
        self._launch, self._console = launch, console
        here = replicas // host.count
        self._here = range(host.number * here, (host.number + 1) * here)
        self._hosts = HostsOfReplicas(host)
        self._store = ReplicaStore(self._hosts.store)
        self._attempts = dict.fromkeys(self._here, 0)
        self._failures: dict[int, dict[int, ProcessFailure]] = {}  # of replicas that have failed
        self._errors: list[BaseException] = []
        self._ended = 0

    def run(self) -> dict[int, ProcessFailure]:
        """Run all replicas to their end.

        Returns:
            The failures of this host's ranks, if no replica on any host has finished.

        Raises:
            JobEndedByRanksError: the ranks have found that the job cannot continue.
            BaseException: what a signal handler has raised here, or an agent.
        """
        threads = [
            threading.Thread(target=self._run_one, args=(number,), name=f"replica-{number}", daemon=True)
            for number in self._here
        ]
        for thread in threads:
            thread.start()
        try:
            while any(thread.is_alive() for thread in threads):
                self._hosts.beat()
                time.sleep(LOOK_EVERY)
            self._hosts.has_no_replica_left()
            while self._store.over is None and self._hosts.others_have_replicas():
                self._hosts.beat()
                time.sleep(LOOK_EVERY)
        except BaseException:
            self._store.end("smdrun was ended")
            raise
        over = self._store.over
        self._hosts.leave()
        if over:
            raise JobEndedByRanksError(over)
        if over == FINISHED:
            return {}
        if self._errors:
            raise self._errors[0]
        return {rank: failure for failures in self._failures.values() for rank, failure in failures.items()}

    def _run_one(self, number: int) -> None:
        first = number * self._size
        end = "has ended for good"
        try:
            self._launch(lambda: self._before_attempt(number), self._placing(number))
            self._store.end(FINISHED)
        except ChildFailedError as error:
            self._failures[number] = {first + rank: failure for rank, failure in error.failures.items()}
        except BaseException as error:  # nothing above a thread would see it
            self._errors.append(error)
            end = f"could not be {'restarted' if self._attempts[number] > 1 else 'started'} ({error})"
        self._ended += 1
        if self._store.over is None and self._go_on_without():
            self._console.say(f"{self._name(number)} {end}; the others go on without it")
        self._store.attempt_has_ended(number)

    def _go_on_without(self) -> bool:
        return self._ended < len(self._here) or self._hosts.others_have_replicas()

    def _before_attempt(self, number: int) -> None:
        """Announce each restart, which comes when no process of the last attempt is left."""
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
            job_place = JobPlace(
                self._hosts.address,
                Replica(number, attempt),
                self._replicas,
                rank,
                self._size,
                (number - self._here.start) * self._size + rank,
                len(self._here) * self._size,
            )
            env.update(job_place.variables())

        return place

    def _name(self, number: int) -> str:
        first = number * self._size
        ranks = ", ".join(map(str, range(first, first + self._size)))
        return f"replica {number} (rank{'s' * (self._size > 1)} {ranks})"
