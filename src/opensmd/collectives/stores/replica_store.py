"""The store of a job whose replicas come and go: it outlives each of them, and says who is there.

smdrun serves it, and writes down which attempts of a replica have ended. The ranks write down where they are,
and agree in it on the members of every *generation*: the replicas that train together until one is lost or
another one comes. An agreement is one value, and whoever writes it first decides for all.

=====================================  ==========================================================
``ended/REPLICA``                      how many attempts of this replica have ended
``left/REPLICA/ATTEMPT``               the points that one had passed which came to its script's end
``arrived/GENERATION/RANK``            what a rank says that wants to be in this generation
``decided/GENERATION``                 its members
``ready/GENERATION``                   how many of their ranks have seen that
``settled/GENERATION``                 whether all have, or one has ended before
``joining``, ``joining/NUMBER``        how many have asked to join, and each of them
``over``                               why nobody is to start or join any more
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
FINISHED = ""  # why a job is over that ended well
_TIMEOUT = timedelta(seconds=60)  # for an answer of the store's


class Replica(NamedTuple):
    """One start of the ranks that hold a copy of the model."""

    number: int
    attempt: int


@dataclass(frozen=True)
class JobPlace:
    """Where smdrun has put this process.

    Attributes:
        address: of the job's store.
        replica: which this rank is part of.
        replicas: that the job begins with.
        rank: within its replica.
        size: ranks of a replica.
        local_rank, local_size: on the host, among the ranks of all replicas.
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
        """What smdrun has said; None if its replicas do not come and go."""
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
        """What to say to a rank, so that it finds this again."""
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
        """A client of the store at ``host:port``."""
        host, _, port = address.rpartition(":")
        return cls(TCPStore(host, int(port), None, False, _TIMEOUT, wait_for_workers=False))

    def attempt_has_ended(self, replica: int) -> None:
        """Said by smdrun when no process of the attempt is left."""
        self.store.add(f"ended/{replica}", 1)

    def has_ended(self, replica: Replica) -> bool:
        """Whether no process of it is left."""
        return self.store.add(f"ended/{replica.number}", 0) > replica.attempt

    def end(self, why: str) -> None:
        """Let nobody start or join any more; the first reason counts."""
        self._decide("over", json.dumps(why))

    @property
    def over(self) -> str | None:
        """Why nobody is to start any more, empty if all is done; None while the job goes on."""
        found: str | None = self._read("over")
        return found

    def arrive(self, generation: int, replica: Replica, rank: int, said: Any) -> None:
        """A rank wants to be in a generation; ``said`` is for the others, as JSON has it."""
        self._write(f"arrived/{generation}/{_place(replica, rank)}", said)

    def arrived(self, generation: int, replica: Replica, size: int) -> list[Any]:
        """What the ranks of a replica have said that have come to a generation."""
        return self._read_all([f"arrived/{generation}/{_place(replica, rank)}" for rank in range(size)])

    def decide(self, generation: int, decision: Any) -> None:
        """Let this be the decision on a generation, unless there is one."""
        self._decide(f"decided/{generation}", json.dumps(decision))

    def decision(self, generation: int) -> Any:
        """What was decided, None if nothing was."""
        return self._read(f"decided/{generation}")

    def is_ready(self, generation: int) -> None:
        """Another rank of a generation has seen who its members are."""
        self.store.add(f"ready/{generation}", 1)

    def ready(self, generation: int) -> int:
        """How many ranks of a generation have seen that."""
        return self.store.add(f"ready/{generation}", 0)

    def settle(self, generation: int, good: bool) -> bool:
        """Say whether the groups of a generation are to be made; whoever says it first decides for all."""
        self._decide(f"settled/{generation}", json.dumps(good))
        return bool(self._read(f"settled/{generation}"))

    def leave(self, replica: Replica, done: int) -> None:
        """A replica has come to the end of its script."""
        self._write(f"left/{_place(replica)}", done)

    def left(self, replica: Replica) -> int | None:
        """The points that a replica had passed which came to the end of its script."""
        found: int | None = self._read(f"left/{_place(replica)}")
        return found

    def ask_to_join(self, replica: Replica, said: Any) -> None:
        """A replica wants to be in the next generation."""
        # The request first: whoever sees the number finds it.
        number = self.store.add("asked", 1)
        self._write(f"joining/{number}", [*replica, said])
        self.store.add("joining", 1)

    def requests(self) -> int:
        """How many replicas have asked to join since the job began."""
        return self.store.add("joining", 0)

    def joining(self, but: Collection[Replica]) -> dict[Replica, Any]:
        """The replicas that have asked to join, with what they said, without those in ``but``."""
        keys = [f"joining/{number}" for number in range(1, self.store.add("asked", 0) + 1)]
        found = {Replica(number, attempt): said for number, attempt, said in self._read_all(keys)}
        return {replica: said for replica, said in found.items() if replica not in but}

    def set_number(self, name: str, number: int) -> None:
        """Keep a number for all."""
        self._write(f"number/{name}", number)

    def number(self, name: str) -> int:
        """A number that was kept, 0 before."""
        return int(self._read(f"number/{name}") or 0)

    def add(self, name: str) -> int:
        """Count in a counter of this name, and say how far it has come."""
        return self.store.add(f"count/{name}", 1)

    def _write(self, key: str, value: Any) -> None:
        self.store.set(key, seal_text(key, json.dumps(value)))  # type: ignore[arg-type]

    def _decide(self, key: str, text: str) -> None:
        self.store.compare_set(key, "", seal_text(key, text))  # type: ignore[arg-type]

    def _read(self, key: str) -> Any:
        return json.loads(open_text(key, self.store.get(key))) if self.store.check([key]) else None

    def _read_all(self, keys: list[str]) -> list[Any]:
        """What is there of these, in their order."""
        if keys and self.store.check(keys):
            return [json.loads(open_text(key, self.store.get(key))) for key in keys]
        return [value for value in map(self._read, keys) if value is not None]


def _place(replica: Replica, rank: int | None = None) -> str:
    return "/".join(map(str, replica if rank is None else (*replica, rank)))
