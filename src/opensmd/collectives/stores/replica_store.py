"""The store of an elastic job: it outlives all replicas, and says which are there.

smdrun serves it, and records which attempts of a replica have ended. The ranks record where they are, and
agree in it on the members of every *generation*: the replicas that train together until one is lost or joins.
An agreement is one value, and whoever writes it first decides for all.

=====================================  ==========================================================
``ended/REPLICA``                      how many attempts of this replica have ended
``left/REPLICA/ATTEMPT``               the points that an attempt had passed when its script ended
``arrived/GENERATION/RANK``            what a rank that wants to be in this generation says
``decided/GENERATION``                 its members
``ready/GENERATION``                   how many of their ranks have seen that
``settled/GENERATION``                 whether all have, or one has ended before
``joining``, ``joining/NUMBER``        how many have asked to join, and each request
``over``                               why nothing may start or join any more
=====================================  ==========================================================
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, NamedTuple

from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from opensmd.collectives.sealed import open_text, seal_text

__all__ = ["FINISHED", "JobPlace", "Replica", "ReplicaStore"]

ADDRESS, NUMBER, COUNT = "SMDRUN_REPLICAS_STORE", "SMDRUN_REPLICA", "SMDRUN_REPLICAS"
FINISHED = ""  # the reason if a job ended successfully
_TIMEOUT = timedelta(seconds=60)  # for an answer from the store


class Replica(NamedTuple):
    """One start of the ranks that hold a copy of the model."""

    number: int
    attempt: int


@dataclass(frozen=True)
class JobPlace:
    """Where smdrun has put this process.

    Attributes:
        address: that of the job's store.
        replica: the one this rank belongs to.
        replicas: the initial number of replicas.
        rank: the rank within its replica.
        size: the number of ranks of a replica.
        local_rank, local_size: among the ranks of all replicas on the host.
    """

    address: str
    replica: Replica
    replicas: int
    rank: int
    size: int
    local_rank: int
    local_size: int

    @classmethod
    def from_environment(cls, environ: Mapping[str, str]) -> JobPlace | None:
        """Read what smdrun has set; None if the job is not elastic."""
        if ADDRESS not in environ:
            return None
        number, replicas = int(environ[NUMBER]), int(environ[COUNT])
        rank, size = int(environ["RANK"]), int(environ["WORLD_SIZE"]) // replicas
        return cls(
            environ[ADDRESS],
            Replica(number, int(environ["TORCHELASTIC_RESTART_COUNT"])),
            replicas,
            rank - number * size,
            size,
            int(environ["LOCAL_RANK"]),
            int(environ["LOCAL_WORLD_SIZE"]),
        )

    def variables(self) -> dict[str, str]:
        """Return the variables from which a rank can restore this."""
        first = self.replica.number * self.size
        return {
            ADDRESS: self.address,
            NUMBER: str(self.replica.number),
            COUNT: str(self.replicas),
            "RANK": str(first + self.rank),
            "WORLD_SIZE": str(self.replicas * self.size),
            "LOCAL_RANK": str(self.local_rank),
            "LOCAL_WORLD_SIZE": str(self.local_size),
        }


class ReplicaStore:
    """One process's client of the job's store. No call waits for a key.

    Args:
        store: the job's.
    """

    def __init__(self, store: Store) -> None:
        self.store = PrefixStore("replicas", store)

    @classmethod
    def at(cls, address: str) -> ReplicaStore:
        """Return a client of the store at ``host:port``."""
        host, _, port = address.rpartition(":")
        return cls(TCPStore(host, int(port), None, False, _TIMEOUT, wait_for_workers=False))

    def attempt_has_ended(self, replica: int) -> None:
        """Note that no process of the attempt is left; smdrun calls this."""
        self.store.add(f"ended/{replica}", 1)

    def has_ended(self, replica: Replica) -> bool:
        """Whether no process of the attempt is left."""
        return self.store.add(f"ended/{replica.number}", 0) > replica.attempt

    def end(self, why: str) -> None:
        """Let nothing start or join any more; the first reason counts."""
        self._decide("over", json.dumps(why))

    @property
    def over(self) -> str | None:
        """Return why nothing may start any more, empty if all is done; None while the job continues."""
        reason: str | None = self._read("over")
        return reason

    def arrive(self, generation: int, replica: Replica, rank: int, note: Any) -> None:
        """Announce that a rank wants to be in a generation; ``note`` is for the others, as JSON."""
        self._write(f"arrived/{generation}/{_place(replica, rank)}", note)

    def arrived(self, generation: int, replica: Replica, size: int) -> list[Any]:
        """Return what a replica's ranks have said on arriving at a generation."""
        return self._read_all([f"arrived/{generation}/{_place(replica, rank)}" for rank in range(size)])

    def decide(self, generation: int, decision: Any) -> None:
        """Make this the decision on a generation, unless there is one."""
        self._decide(f"decided/{generation}", json.dumps(decision))

    def decision(self, generation: int) -> Any:
        """Return the decision, or None."""
        return self._read(f"decided/{generation}")

    def is_ready(self, generation: int) -> None:
        """Note that another rank of a generation has seen its members."""
        self.store.add(f"ready/{generation}", 1)

    def ready(self, generation: int) -> int:
        """Return how many ranks of a generation have seen that."""
        return self.store.add(f"ready/{generation}", 0)

    def settle(self, generation: int, good: bool) -> bool:
        """Decide whether to create the groups of a generation; the first decision counts for all."""
        self._decide(f"settled/{generation}", json.dumps(good))
        return bool(self._read(f"settled/{generation}"))

    def leave(self, replica: Replica, done: int) -> None:
        """Note that a replica has reached the end of its script."""
        self._write(f"left/{_place(replica)}", done)

    def left(self, replica: Replica) -> int | None:
        """Return the points that a replica had passed when its script ended."""
        done: int | None = self._read(f"left/{_place(replica)}")
        return done

    def ask_to_join(self, replica: Replica, note: Any) -> None:
        """Request to join the next generation."""
        # The request first, so that whoever sees the number finds it.
        number = self.store.add("asked", 1)
        self._write(f"joining/{number}", [*replica, note])
        self.store.add("joining", 1)

    def requests(self) -> int:
        """Return how many requests to join there have been since the start of the job."""
        return self.store.add("joining", 0)

    def joining(self, but: Collection[Replica]) -> dict[Replica, Any]:
        """Return the replicas that have asked to join, with what they said, except those in ``but``."""
        keys = [f"joining/{number}" for number in range(1, self.store.add("asked", 0) + 1)]
        requests = {Replica(number, attempt): note for number, attempt, note in self._read_all(keys)}
        return {replica: note for replica, note in requests.items() if replica not in but}

    def set_number(self, name: str, number: int) -> None:
        """Store a number for all."""
        self._write(f"number/{name}", number)

    def number(self, name: str) -> int:
        """Return a stored number, initially 0."""
        return int(self._read(f"number/{name}") or 0)

    def add(self, name: str) -> int:
        """Add to a counter of this name, and return its value."""
        return self.store.add(f"count/{name}", 1)

    def _write(self, key: str, value: Any) -> None:
        self.store.set(key, seal_text(key, json.dumps(value)))  # type: ignore[arg-type]

    def _decide(self, key: str, text: str) -> None:
        self.store.compare_set(key, "", seal_text(key, text))  # type: ignore[arg-type]

    def _read(self, key: str) -> Any:
        return json.loads(open_text(key, self.store.get(key))) if self.store.check([key]) else None

    def _read_all(self, keys: list[str]) -> list[Any]:
        """Return the existing values of these keys, in order."""
        if keys and self.store.check(keys):
            return [json.loads(open_text(key, self.store.get(key))) for key in keys]
        return [value for value in map(self._read, keys) if value is not None]


def _place(replica: Replica, rank: int | None = None) -> str:
    return "/".join(map(str, replica if rank is None else (*replica, rank)))
