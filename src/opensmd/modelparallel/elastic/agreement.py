"""How the remaining replicas agree, in the job's store, on the members of the next generation."""

from __future__ import annotations

import time
from collections.abc import Sequence

from opensmd.collectives.stores.replica_store import FINISHED, JobPlace, Replica, ReplicaStore
from opensmd.modelparallel.elastic.membership import Arrived, Decision, decide
from opensmd.modelparallel.exceptions import SMPError

__all__ = ["Agreement"]

START = 900.0  # seconds for all ranks to start, as for the agents of several hosts
SOON, LATER = 0.005, 0.1  # seconds between looks into the store, at first and after a while


class _Looks:
    """Waits between looks, at first briefly, later longer: starting ranks need time and the cores."""

    def __init__(self) -> None:
        self._began = time.monotonic()

    @property
    def seconds(self) -> float:
        """The time since the first look."""
        return time.monotonic() - self._began

    def pause(self) -> None:
        """Wait until the next look."""
        time.sleep(min(LATER, max(SOON, self.seconds / 20)))


class Agreement:
    """This rank's part in deciding who trains together.

    Args:
        store: the job's.
        place: this rank's position in the job.
        timeout: seconds after which a rank that does not come is given up.

    Attributes:
        generation: the number of the current members; -1 at first.
        members: the replicas that train together now, in order.
        requests: how many requests to join have been handled.
    """

    def __init__(self, store: ReplicaStore, place: JobPlace, timeout: float) -> None:
        self._store, self._place, self._timeout = store, place, timeout
        self.generation = -1
        self.members: Sequence[Replica] = [Replica(number, 0) for number in range(place.replicas)]
        self.requests = 0

    def require_job(self) -> None:
        """Check that the job continues.

        Raises:
            SMPError: the job cannot continue; the message says why.
            SystemExit: with status 0, because the job is complete.
        """
        over = self._store.over
        if over == FINISHED:
            raise SystemExit(0)
        if over is not None:
            raise SMPError(over)

    def next_generation(self, arrival: Arrived) -> Decision:
        """Arrive at the next generation and wait until its members are known.

        Raises:
            SMPError: the others have continued without this replica, or this replica has lost a rank.
        """
        generation = self.generation + 1
        self._store.arrive(generation, self._place.replica, self._place.rank, arrival.to_json())
        looks = _Looks()
        while (stored := self._store.decision(generation)) is None:
            if self._store.has_ended(self._place.replica):
                raise SMPError(f"replica {self._place.replica.number} has lost one of its ranks")
            decision = self._decided(generation, looks.seconds)
            if decision is not None:
                self._store.decide(generation, decision.to_json())
            else:
                looks.pause()
        return self._follow(generation, Decision.from_json(stored))

    def admission(self, loop: int) -> Decision | None:
        """Ask to join at the border of a loop, and wait for it; None if the loop is over.

        Raises:
            SMPError: no replica is left to join, or the job cannot continue.
            SystemExit: with status 0, because the job is complete.
        """
        store, place = self._store, self._place
        if store.add(f"joining/{loop}/{place.replica}") == place.size:
            store.ask_to_join(place.replica, loop)
        generation, looks = 0, _Looks()
        while True:
            self.require_job()
            if store.number("loop") > loop:
                return None
            stored = store.decision(generation)
            if stored is None:
                self._require_members(generation)
                looks.pause()
                continue
            decision = Decision.from_json(stored)
            if place.replica in decision.members:
                return self._follow(generation, decision)
            self.members = decision.members
            generation += 1

    def wait_until_all_know(self, decision: Decision) -> bool:
        """Wait until every member has seen the decision; return False if one has ended before.

        Creating groups waits for all members, and would not notice an end.
        """
        self._store.is_ready(self.generation)
        looks, expected = _Looks(), len(decision.members) * self._place.size
        while self._store.ready(self.generation) < expected:
            if looks.seconds > self._timeout or any(map(self._store.has_ended, decision.members)):
                return self._store.settle(self.generation, good=False)
            looks.pause()
        return self._store.settle(self.generation, good=True)

    def _decided(self, generation: int, waited: float) -> Decision | None:
        store, size = self._store, self._place.size
        requests = store.requests()
        ended = {replica: store.left(replica) for replica in self.members if store.has_ended(replica)}
        waiting = store.joining(self.members) if requests > self.requests else {}
        ended |= {replica: None for replica in waiting if store.has_ended(replica)}
        return decide(
            {
                replica: [Arrived(**note) for note in store.arrived(generation, replica, size)]
                for replica in self.members
            },
            size,
            ended=ended,
            waiting=waiting,
            requests=requests,
            patience_is_over=waited > (max(START, self._timeout) if generation == 0 else self._timeout),
        )

    def _follow(self, generation: int, decision: Decision) -> Decision:
        self.generation, self.members = generation, decision.members
        self.requests = max(self.requests, decision.requests)
        if self._place.replica not in decision.members:
            raise SMPError(
                f"the other replicas go on without replica {self._place.replica.number}: not all of its "
                f"ranks came within {self._timeout:g} s, or none had the model's state"
            )
        return decision

    def _require_members(self, generation: int) -> None:
        """Raise if no replica is left that this one could join."""
        if all(map(self._store.has_ended, self.members)) and self._store.decision(generation) is None:
            self._store.end(
                "no replica is left that has the model's state, so there is none to join: start the job "
                "again, from a checkpoint if there is one"
            )
            self.require_job()
