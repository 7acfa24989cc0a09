"""The rank grid: every rank's position in data, pipeline and tensor parallelism, and every group; pure.

``size = D x P x T``. The placement is the order in which the three coordinates vary over the global ranks,
the last letter fastest: ``cluster`` is ``DPT`` (a replica's stages are neighbours), ``spread`` is ``TPD``.

====================  ======================  =========================
8 ranks, 2 stages     cluster                 spread
====================  ======================  =========================
stages of a replica   01 23 45 67             04 15 26 37
replicas of a stage   0246 1357               0123 4567
====================  ======================  =========================
"""

from __future__ import annotations

import enum
import functools
from collections import defaultdict
from dataclasses import dataclass

__all__ = ["CommGroup", "Coordinates", "RankGrid", "RankType"]

_ORDERS = {"cluster": "DPT", "spread": "TPD"}


class CommGroup(enum.Enum):
    """A set of ranks, seen from the caller; the value says which coordinates vary within it."""

    WORLD = "DPT"
    MP_GROUP = "PT"
    DP_GROUP = "DT"
    PP_GROUP = "P"
    TP_GROUP = "T"
    RDP_GROUP = "D"


class RankType(enum.Enum):
    """How to interpret a rank number: as a rank within this group of the caller."""

    WORLD_RANK = "WORLD"
    MP_RANK = "MP_GROUP"
    DP_RANK = "DP_GROUP"
    PP_RANK = "PP_GROUP"
    TP_RANK = "TP_GROUP"
    RDP_RANK = "RDP_GROUP"

    @property
    def group(self) -> CommGroup:
        """The group that the rank is counted in."""
        return CommGroup[self.value]


@dataclass(frozen=True)
class Coordinates:
    """A rank's position: its replica, its stage, its part of the tensors."""

    data: int
    pipeline: int
    tensor: int


@dataclass(frozen=True)
class RankGrid:
    """All ranks of a job.

    Attributes:
        size: number of ranks.
        pipeline: stages of a replica.
        tensor: ranks that share each stage.
        placement: ``"cluster"``, ``"spread"`` or an order of the letters D, P and T.

    Raises:
        ValueError: ``size`` is not a multiple of ``pipeline * tensor``.
    """

    size: int
    pipeline: int = 1
    tensor: int = 1
    placement: str = "cluster"

    def __post_init__(self) -> None:
        replica = self.pipeline * self.tensor
        if self.size % replica:
            ranks = "1 rank" if self.size == 1 else f"{self.size} ranks"
            partitions = "1 partition" if self.pipeline == 1 else f"{self.pipeline} partitions"
            raise ValueError(
                f"{ranks} cannot hold whole replicas of {replica} ranks each "
                f"({partitions}{self._shares}); start a multiple of {replica} processes, as in "
                f"smdrun -n {replica} train.py"
            )

    @property
    def data(self) -> int:
        """The number of replicas."""
        return self.size // (self.pipeline * self.tensor)

    def coordinates(self, rank: int) -> Coordinates:
        """Return the position of a global rank."""
        found: dict[str, int] = {}
        for letter in reversed(self._order):
            rank, found[letter] = divmod(rank, self._length(letter))
        return Coordinates(found["D"], found["P"], found["T"])

    def members(self, group: CommGroup, rank: int) -> tuple[int, ...]:
        """Return the global ranks, ascending, of the ``group`` that ``rank`` is in."""
        return _members(self, group, rank)

    def rank_in(self, group: CommGroup, rank: int) -> int:
        """Return the number of a global rank within its ``group``."""
        return self.members(group, rank).index(rank)

    def partition(self, group: CommGroup) -> list[tuple[int, ...]]:
        """Return all groups of this kind, each ascending, in the order of their first ranks."""
        fixed = set("DPT") - set(group.value)
        groups: dict[tuple[int, ...], list[int]] = defaultdict(list)
        for rank in range(self.size):
            place = self.coordinates(rank)
            by_letter = {"D": place.data, "P": place.pipeline, "T": place.tensor}
            groups[tuple(by_letter[letter] for letter in sorted(fixed))].append(rank)
        return sorted(tuple(ranks) for ranks in groups.values())

    @property
    def _shares(self) -> str:
        return f" of {self.tensor} tensor-parallel ranks" if self.tensor > 1 else ""

    @property
    def _order(self) -> str:
        return _ORDERS.get(self.placement, self.placement)

    def _length(self, letter: str) -> int:
        return {"D": self.data, "P": self.pipeline, "T": self.tensor}[letter]


@functools.cache  # called once per parameter, and there may be thousands of ranks
def _members(grid: RankGrid, group: CommGroup, rank: int) -> tuple[int, ...]:
    return next(ranks for ranks in grid.partition(group) if rank in ranks)
