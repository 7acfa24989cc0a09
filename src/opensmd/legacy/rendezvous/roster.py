"""Who gets which rank; pure, so that every process that sees the same roster assigns the same ranks."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from opensmd.legacy.rendezvous.host import Process

__all__ = ["Member", "assign_ranks", "contradiction", "missing_ranks"]


@dataclass(frozen=True)
class Member:
    """One arrival: the process, its requested rank (-1: any) and its world size."""

    process: Process
    rank: int
    world_size: int

    def to_json(self) -> str:
        """Return it as text for a store."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str | bytes) -> Member:
        """The inverse of :meth:`to_json`."""
        fields = json.loads(text)
        return cls(Process(**fields["process"]), fields["rank"], fields["world_size"])

    def __str__(self) -> str:
        return f"rank {self.rank} ({self.process})" if self.rank >= 0 else str(self.process)


def assign_ranks(members: Sequence[Member]) -> list[int]:
    """Return the rank of each member, in order; there must be no :func:`contradiction`.

    Requested ranks are kept; the rest go in order of arrival to those that requested none.
    """
    taken = {member.rank for member in members}
    free = iter(rank for rank in range(len(members)) if rank not in taken)
    return [member.rank if member.rank >= 0 else next(free) for member in members]


def contradiction(members: Sequence[Member]) -> str | None:
    """Return why these members cannot be part of one job; None if they can.

    They must have the same world size, and request different ranks within it.
    """
    taken: dict[int, Member] = {}
    for member in members:
        first = members[0]
        if member.world_size != first.world_size:
            return (
                f"{first} was started with world_size {first.world_size}, {member} with "
                f"{member.world_size}; give all processes the same"
            )
        if member.rank >= member.world_size:
            return (
                f"{member.process} asks for rank {member.rank}; expected 0 to {member.world_size - 1} with "
                f"world_size {member.world_size}"
            )
        if member.rank in taken:
            return (
                f"rank {member.rank} was taken twice, by {taken[member.rank].process} and {member.process}; "
                "give each process its own rank, and after a restart of one process start all again"
            )
        if member.rank >= 0:
            taken[member.rank] = member
    return None


def missing_ranks(members: Sequence[Member], world_size: int) -> str:
    """Describe who has not come, as precisely as the members' ranks allow."""
    lacking = world_size - len(members)
    if members and all(member.rank >= 0 for member in members):
        absent = sorted(set(range(world_size)) - {member.rank for member in members})
        return f"rank {absent[0]}" if len(absent) == 1 else f"ranks {', '.join(map(str, absent))}"
    return "one process" if lacking == 1 else f"{lacking} processes"
