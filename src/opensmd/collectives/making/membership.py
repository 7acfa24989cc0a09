"""One process's place in one group."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta

from torch._C._distributed_c10d import PrefixStore, Store

__all__ = ["Membership"]


@dataclass(frozen=True)
class Membership:
    """One process's place in one group.

    Attributes:
        store: used only by this group.
        rank: this process's rank in the group.
        ranks: the members' global ranks, by group rank.
        timeout: for creating the group and for its operations.
        name: the group's name, for messages.
    """

    store: Store
    rank: int
    ranks: tuple[int, ...]
    timeout: timedelta
    name: str

    @property
    def size(self) -> int:
        """The number of members."""
        return len(self.ranks)

    @property
    def global_rank(self) -> int:
        """This process's rank in the whole job."""
        return self.ranks[self.rank]

    def in_part(
        self, store: Store, rank: int, ranks: Sequence[int], *, timeout: timedelta, name: str
    ) -> Membership:
        """Return this process's place in a part of this split group.

        Args:
            store: the one shared by all parts of the split.
            rank: this process's rank in the part.
            ranks: the part's ranks in this group.
            timeout: the part's.
            name: the part's.
        """
        members = tuple(self.ranks[other] for other in ranks)
        return Membership(PrefixStore(f"{name}/", store), rank, members, timeout, name)
