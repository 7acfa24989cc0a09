"""Who trains together from now on: what one member decides for all from what it sees in the store; pure.

A job is a row of *points*: steps, and other operations of all replicas. Each ends with a word of everybody to
everybody that it is done. A member that got that word knows that all have done their part, whatever happened
to them afterwards; so a point that one member has passed is done for all, and any other is done again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from opensmd.collectives.stores.replica_store import Replica

__all__ = ["Arrived", "Decision", "decide"]


@dataclass(frozen=True)
class Arrived:
    """Where a rank stands that has no groups.

    Attributes:
        done: points that it has passed.
        loop: the number of the loop at whose border it stands, where others may join; None inside a step.
        has_state: its model is that of the other members.
    """

    done: int
    loop: int | None
    has_state: bool

    def to_json(self) -> dict[str, Any]:
        """What is written into the job's store."""
        return asdict(self)


@dataclass(frozen=True)
class Decision:
    """The members of a generation.

    Attributes:
        members: those that go on first, in the order that they had.
        joined: those of them that get their state from the others.
        done: points that are done for all.
        requests: of replicas to join, with which the decision has dealt.
        lost: of the members before.
    """

    members: tuple[Replica, ...]
    joined: tuple[Replica, ...]
    done: int
    requests: int
    lost: tuple[Replica, ...]

    def to_json(self) -> dict[str, Any]:
        """What is written into the job's store."""
        return asdict(self)

    @classmethod
    def from_json(cls, found: Mapping[str, Any]) -> Decision:
        """What :meth:`to_json` made."""
        members, joined, lost = (
            tuple(Replica(*each) for each in found[name]) for name in ("members", "joined", "lost")
        )
        return cls(members, joined, int(found["done"]), int(found["requests"]), lost)


def decide(
    before: Mapping[Replica, Sequence[Arrived]],
    size: int,
    *,
    ended: Mapping[Replica, int | None],
    waiting: Mapping[Replica, int],
    requests: int,
    patience_is_over: bool,
) -> Decision | None:
    """The members of the next generation; None while one has to be waited for.

    Args:
        before: the members of the last one, with those of their ranks that have come.
        size: ranks of a replica.
        ended: the replicas of which no process is left, with the points that they have passed if they came to
            the end of their script.
        waiting: replicas that have asked to join, and the number of the loop at whose border.
        requests: that have come; those of ``waiting``, or fewer.
        patience_is_over: who has not come by now is given up.
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
    left = [done for replica, done in ended.items() if replica in before and done is not None]
    # Without state, a replica knows of no points.
    done = max([arrival.done for arrival in all_there if arrival.has_state] + left, default=0)
    joined = {replica for replica, arrivals in there.items() if not all(each.has_state for each in arrivals)}
    members = [replica for replica in there if replica not in joined]
    if not members:  # those that had the state are lost
        return Decision((), (), done, requests, tuple(before))
    loops = {arrival.loop for arrival in all_there}
    at_one_border = len(loops) == 1 and None not in loops
    come = [replica for replica, loop in waiting.items() if at_one_border and loop in loops]
    come = [replica for replica in come if replica not in ended and replica not in before]
    joining = [*sorted(joined), *sorted(come)]
    return Decision(
        (*members, *joining),
        tuple(joining),
        done,
        requests if at_one_border else 0,
        tuple(replica for replica in before if replica not in there),
    )
