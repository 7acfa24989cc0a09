"""Who trains together from now on, as one member decides for all from the contents of the store; pure.

A job is a sequence of *points*: steps, and other operations of all replicas. Each ends with a message from
all to all that it is done. A member that has received these knows that all have done their part, whatever
happened to them afterwards. So a point that one member has passed is done for all, and any other is repeated.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from opensmd.collectives.stores.replica_store import Replica

__all__ = ["Arrived", "Decision", "decide"]


@dataclass(frozen=True)
class Arrived:
    """The situation of a rank without groups.

    Attributes:
        done: the number of points that it has passed.
        loop: the number of the loop at whose border it is, where others may join; None inside a step.
        has_state: whether its model equals that of the other members.
    """

    done: int
    loop: int | None
    has_state: bool

    def to_json(self) -> dict[str, Any]:
        """Return the text for the job's store."""
        return asdict(self)


@dataclass(frozen=True)
class Decision:
    """The members of a generation.

    Attributes:
        members: first those that continue, in their previous order.
        joined: the members that get their state from the others.
        done: the number of points that are done for all.
        requests: how many requests to join the decision has handled.
        lost: the lost members of the previous generation.
    """

    members: tuple[Replica, ...]
    joined: tuple[Replica, ...]
    done: int
    requests: int
    lost: tuple[Replica, ...]

    def to_json(self) -> dict[str, Any]:
        """Return the text for the job's store."""
        return asdict(self)

    @classmethod
    def from_json(cls, stored: Mapping[str, Any]) -> Decision:
        """Parse a text from :meth:`to_json`."""
        members, joined, lost = (
            tuple(Replica(*fields) for fields in stored[name]) for name in ("members", "joined", "lost")
        )
        return cls(members, joined, int(stored["done"]), int(stored["requests"]), lost)


def decide(
    before: Mapping[Replica, Sequence[Arrived]],
    size: int,
    *,
    ended: Mapping[Replica, int | None],
    waiting: Mapping[Replica, int],
    requests: int,
    patience_is_over: bool,
) -> Decision | None:
    """Return the members of the next generation, or None while one has to be waited for.

    Args:
        before: the previous members, with those of their ranks that have arrived.
        size: the number of ranks of a replica.
        ended: the replicas with no process left, with the points that they have passed if they completed
            their script.
        waiting: replicas that have asked to join, and the number of the loop where they did.
        requests: the number of requests that have come; those of ``waiting``, or fewer.
        patience_is_over: whether to give up those that have not come by now.
    """
    there = {
        replica: arrivals
        for replica, arrivals in before.items()
        if len(arrivals) == size and replica not in ended
    }
    missing = [replica for replica in before if replica not in there and replica not in ended]
    if not there or (missing and not patience_is_over):
        return None
    all_there = [arrival for arrivals in there.values() for arrival in arrivals]
    finished = [done for replica, done in ended.items() if replica in before and done is not None]
    # A replica without state knows of no points.
    done = max([arrival.done for arrival in all_there if arrival.has_state] + finished, default=0)
    joined = {
        replica for replica, arrivals in there.items() if not all(arrival.has_state for arrival in arrivals)
    }
    members = [replica for replica in there if replica not in joined]
    if not members:  # all that had the state are lost
        return Decision((), (), done, requests, tuple(before))
    loops = {arrival.loop for arrival in all_there}
    at_one_border = len(loops) == 1 and None not in loops
    arrived = [replica for replica, loop in waiting.items() if at_one_border and loop in loops]
    arrived = [replica for replica in arrived if replica not in ended and replica not in before]
    joining = [*sorted(joined), *sorted(arrived)]
    return Decision(
        (*members, *joining),
        tuple(joining),
        done,
        requests if at_one_border else 0,
        tuple(replica for replica in before if replica not in there),
    )
