"""The process groups of the rank grid, made once by ``smp.init``.

Every rank creates every group, in the same order, because ``torch.distributed.new_group`` requires it. Kinds
of groups with the same members (pipeline and model-parallel groups without tensor parallelism) share one.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

import torch.distributed as dist

from opensmd.collectives._torch_internals import timeout_of
from opensmd.modelparallel.ranks.grid import CommGroup, RankGrid

__all__ = ["Groups", "default_group"]


class Groups:
    """The groups that this rank belongs to.

    Args:
        grid: the position of each rank.
        rank: this process's global rank.
        backend: of the new groups; None takes the default group's.
        timeout: of the new groups; None takes the default group's, as scripts that set it expect.

    Attributes:
        messages: all ranks, for objects; kept apart from the user's traffic.
        owners: the ranks of this replica that have parameters, or None on one without.
        owner_stages: the stages of these; all stages until :meth:`split_off_owners` is called.
        shards: the replicas that split parameters among themselves; all, until :meth:`split_replicas`.
        copies: the ranks in other such groups with the same parts; None while there is one group.
    """

    def __init__(
        self, grid: RankGrid, rank: int, *, backend: str | None = None, timeout: timedelta | None = None
    ) -> None:
        self.grid = grid
        self.rank = rank
        world = tuple(range(grid.size))
        timeout = timeout or timeout_of(default_group())
        made: dict[tuple[int, ...], dist.ProcessGroup] = {world: default_group()}
        for kind in CommGroup:
            for members in grid.partition(kind):
                if members not in made:
                    made[members] = _new_group(members, backend, timeout)
        self.messages = _new_group(world, backend, timeout)
        self._groups = {kind: made[grid.members(kind, rank)] for kind in CommGroup}
        self.owners: dist.ProcessGroup | None = self._groups[CommGroup.MP_GROUP]
        self.owner_stages = tuple(range(grid.pipeline))
        self.shards = self._groups[CommGroup.RDP_GROUP]
        self.copies: dist.ProcessGroup | None = None
        self._like = backend, timeout
        self._made = [group for members, group in made.items() if members != world] + [self.messages]

    def __getitem__(self, kind: CommGroup) -> dist.ProcessGroup:
        return self._groups[kind]

    def members(self, kind: CommGroup) -> tuple[int, ...]:
        """Return the global ranks of this rank's group, ascending; the i-th has rank i in it."""
        return self.grid.members(kind, self.rank)

    def rank_in(self, kind: CommGroup) -> int:
        """Return this rank's number in its group."""
        return self.grid.rank_in(kind, self.rank)

    def size(self, kind: CommGroup) -> int:
        """Return the size of this rank's group."""
        return len(self.members(kind))

    def split_off_owners(self, stages: Sequence[int]) -> None:
        """Set :attr:`owners` to the ranks of these stages in each replica; all ranks must call alike.

        Scripts skip calls such as ``optimizer.step()`` on a rank without parameters, so these may communicate
        only through this group.
        """
        if tuple(stages) == self.owner_stages:
            return
        if len(stages) == self.grid.pipeline:
            self.owners, self.owner_stages = self._groups[CommGroup.MP_GROUP], tuple(stages)
            return
        self.owners, self.owner_stages = None, tuple(stages)
        for members in self.grid.partition(CommGroup.MP_GROUP):
            owners = tuple(rank for rank in members if self.grid.coordinates(rank).pipeline in stages)
            group = self._extra(owners)
            if self.rank in owners:
                self.owners = group

    def split_replicas(self, degree: int) -> None:
        """Split :attr:`shards` into ``degree`` neighbouring replicas each; all ranks must call alike."""
        for replicas in self.grid.partition(CommGroup.RDP_GROUP):
            rows = _rows(replicas, degree)
            for row in rows:
                group = self._extra(row)
                self.shards = group if self.rank in row else self.shards
            for column in zip(*rows, strict=True):
                group = self._extra(column)
                self.copies = group if self.rank in column else self.copies

    def all_shards(self) -> list[tuple[int, ...]]:
        """Return the members of :attr:`shards` of all ranks."""
        degree = self.shards.size()
        return [row for members in self.grid.partition(CommGroup.RDP_GROUP) for row in _rows(members, degree)]

    def _extra(self, members: tuple[int, ...]) -> dist.ProcessGroup:
        group = _new_group(members, *self._like)
        self._made.append(group)
        return group

    def across_pipelines(self) -> list[dist.ProcessGroup]:
        """Return the groups in which ranks of several pipelines wait for each other within a step."""
        kinds = (CommGroup.DP_GROUP, CommGroup.RDP_GROUP, CommGroup.TP_GROUP)
        return [*{self._groups[kind] for kind in kinds}, self.shards, *([self.copies] if self.copies else [])]

    def destroy(self) -> None:
        """Destroy every group created here, in the same order on all ranks."""
        for group in self._made:
            if not isinstance(group, int):  # torch's marker for a group without this rank
                dist.destroy_process_group(group)


def _rows(replicas: tuple[int, ...], degree: int) -> list[tuple[int, ...]]:
    return [replicas[first : first + degree] for first in range(0, len(replicas), degree)]


def default_group() -> dist.ProcessGroup:
    """Return torch's default group, which must exist."""
    world = dist.group.WORLD
    assert world is not None
    return world


def _new_group(members: tuple[int, ...], backend: str | None, timeout: timedelta | None) -> dist.ProcessGroup:
    group: dist.ProcessGroup = dist.new_group(list(members), timeout=timeout, backend=backend)
    return group
