"""Groups as scripts see them: opaque handles, the same for members and non-members."""

from __future__ import annotations

from opensmd.legacy.transports.base import Channel

__all__ = ["Group", "group"]


class Group:
    """A set of ranks that collectives can work on; created only by ``new_group``.

    Args:
        ranks: the members' ranks in the whole job, by position in the group.
        channel: None in a non-member, whose collectives on this group do nothing.
    """

    __slots__ = ("channel", "positions", "ranks")

    def __init__(self, ranks: list[int], channel: Channel | None) -> None:
        self.ranks = tuple(ranks)
        self.positions = {rank: position for position, rank in enumerate(ranks)}
        self.channel = channel

    def __repr__(self) -> str:
        return f"<group of ranks {', '.join(map(str, self.ranks))}>" if self.ranks else "<group.WORLD>"


class group:
    """Holds the constant ``group.WORLD``: all processes of the current job."""

    WORLD = Group([], None)
