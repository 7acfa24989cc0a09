"""Which ranks of a grid are on which hosts, and so which traffic crosses the network; pure."""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import dataclass

from opensmd.modelparallel.ranks.grid import CommGroup, RankGrid

__all__ = ["HostGrid"]


@dataclass(frozen=True)
class HostGrid:
    """All ranks of a job on their hosts.

    Attributes:
        grid: the position of each rank.
        hosts: the number of every rank's host.
    """

    grid: RankGrid
    hosts: tuple[int, ...]

    @property
    def stages_apart(self) -> frozenset[tuple[int, int]]:
        """Return pairs of stages that some replica has on different hosts, the lower one first."""
        return frozenset(
            (stage, stage + step)
            for stages in self.grid.partition(CommGroup.PP_GROUP)
            for step in range(1, len(stages))
            for stage in range(len(stages) - step)
            if self.hosts[stages[stage]] != self.hosts[stages[stage + step]]
        )

    @property
    def sharing(self) -> int:
        """Return the most replicas that send from one stage to the next over one host's link; at least 1."""
        senders: Counter[tuple[int, int]] = Counter()
        for stages in self.grid.partition(CommGroup.PP_GROUP):
            for stage, (one, other) in enumerate(itertools.pairwise(stages)):
                if self.hosts[one] != self.hosts[other]:
                    senders[stage, self.hosts[one]] += 1
        return max(senders.values(), default=1)

    @property
    def averaging(self) -> float:
        """Return bytes on the busiest host's link per byte of a stage's gradients, while all are averaged."""
        crossing = dict.fromkeys(self.hosts, 0.0)
        for replicas in self.grid.partition(CommGroup.RDP_GROUP):
            on = {self.hosts[rank] for rank in replicas}
            for host in on:
                crossing[host] += 2 * (len(on) - 1) / len(on)
        return max(crossing.values())

    def spanning(self, group: CommGroup) -> tuple[int, int]:
        """Return how many groups of this kind span several hosts, and how many there are."""
        groups = self.grid.partition(group)
        return sum(len({self.hosts[rank] for rank in ranks}) > 1 for ranks in groups), len(groups)

    def in_words(self) -> str:
        """Describe what crosses between hosts with this placement."""
        kinds = {
            "activations and their gradients": (CommGroup.PP_GROUP, self.grid.pipeline, "replica"),
            "gradients of weights": (CommGroup.RDP_GROUP, self.grid.data, "average"),
            "tensors of tensor parallelism": (CommGroup.TP_GROUP, self.grid.tensor, "group"),
        }
        said = []
        for what, (group, ranks, noun) in kinds.items():
            spanning, count = self.spanning(group)
            if ranks > 1:
                said.append(f"{what} of {spanning} of {count} {noun}{'s' if count > 1 else ''}")
        hosts = len(set(self.hosts))
        return (
            f"placement_strategy {self.grid.placement!r} on {hosts} hosts: between hosts go "
            f"{', '.join(said) or 'no tensors'}"
        )
