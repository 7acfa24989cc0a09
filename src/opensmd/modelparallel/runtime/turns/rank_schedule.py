"""What one rank does in which order: the settings and the plan, as a policy for each step."""

from __future__ import annotations

import math
from dataclasses import dataclass

from opensmd.modelparallel.planning.plan import Plan
from opensmd.modelparallel.planning.schedule import (
    FixedOrder,
    Policy,
    TableOrder,
    split_backwards,
    window,
)
from opensmd.modelparallel.planning.schedules.fill_drain import fill_drain
from opensmd.modelparallel.planning.schedules.names import Pipeline
from opensmd.modelparallel.planning.schedules.one_forward_one_backward import (
    interleaved,
    one_forward_one_backward,
)
from opensmd.modelparallel.planning.schedules.tables import Table, fused
from opensmd.modelparallel.planning.schedules.v import zero_bubble_v
from opensmd.modelparallel.planning.schedules.zero_bubble import zero_bubble_h1, zero_bubble_h2

__all__ = ["RankSchedule"]


@dataclass(frozen=True, kw_only=True)
class RankSchedule:
    """The schedule of one rank.

    Attributes:
        plan: tells which stages send to which.
        stage: this rank of the pipeline.
        partitions: how many there are.
        pipeline: the setting.
        active_microbatches: how many microbatches may be under way at once.
        in_order: all ranks do everything in one order.
        virtual_stages: how many stages each rank has.
    """

    plan: Plan
    stage: int
    partitions: int
    pipeline: Pipeline
    active_microbatches: int
    in_order: bool
    virtual_stages: int = 1

    @property
    def chain(self) -> bool:
        """Whether all tensors go to higher stages."""
        crossings = self.plan.crossings
        return bool(crossings) and all(crossing.source < crossing.target for crossing in crossings)

    @property
    def _comes_back(self) -> bool:
        """Whether tensors go down the ranks and up again, as in a V."""
        ways = {(crossing.source, crossing.target) for crossing in self.plan.crossings}
        return not self.chain and all((target, source) in ways for source, target in ways if target > source)

    @property
    def _goes_round(self) -> bool:
        """Whether tensors go from the last rank to the first."""
        return any(each.source == self.partitions - 1 and each.target == 0 for each in self.plan.crossings)

    def policy(self, microbatches: int, *, reduces: bool) -> Policy:
        """Who goes on in a step; ``reduces``: replicas reduce gradients in its last backward."""
        if self.in_order:
            return FixedOrder(self._window if self.pipeline != "simple" else microbatches, microbatches)
        if self.pipeline == "simple":
            return self._follow(
                fill_drain(self.partitions, microbatches),
                reduces,
                most_active=math.inf,
                forwards_first=True,
            )
        chunked = self._chunked(microbatches)
        if chunked is not None:
            return self._follow(
                chunked, reduces, most_active=math.inf, early=False, weights_last=not chunked.splits
            )
        active = self.active_microbatches
        if self.pipeline == "zero_bubble" and self.chain and active >= 2 * self.partitions - 1:
            table = zero_bubble_h2(self.partitions, microbatches)
            kept = 2 * self.partitions - 1
            return self._follow(table, reduces, most_active=active, most_kept=kept, weights_last=False)
        table = (one_forward_one_backward if self.pipeline == "1f1b" else zero_bubble_h1)(
            self.partitions, microbatches
        )
        return self._follow(table, reduces, most_active=active, most_kept=active, window=self._window)

    def splits_from(self, microbatches: int, *, reduces: bool) -> int:
        """The microbatches from this one on leave their weight gradients for later."""
        if self.pipeline == "1f1b":
            return microbatches
        most = microbatches
        if self.pipeline == "simple":  # which keeps everything as it is, and fills the drain alone
            most = min(self.stage + 1, self.active_microbatches)
        left = split_backwards(stage=self.stage, chain=self.chain, most=most, microbatches=microbatches)
        return microbatches - left

    @property
    def _window(self) -> int:
        return window(
            partitions=self.partitions,
            stage=self.stage,
            chain=self.chain and not self.in_order,
            active_microbatches=self.active_microbatches,
        )

    def _chunked(self, microbatches: int) -> Table | None:
        """The table of several stages a rank, if the plan has such and there is memory for it."""
        ranks = self.partitions
        if self.active_microbatches < ranks:
            return None
        if self.pipeline == "v" and self._comes_back:
            return fused(zero_bubble_v(ranks, microbatches))
        if self.pipeline == "interleaved" and self._goes_round and microbatches % ranks == 0:
            return interleaved(ranks, microbatches, chunks=self.virtual_stages)
        return None

    def _follow(
        self,
        table: Table,
        reduces: bool,
        *,
        most_active: float,
        most_kept: float = math.inf,
        window: int | None = None,
        early: bool = True,
        weights_last: bool = True,
        forwards_first: bool = False,
    ) -> TableOrder:
        return TableOrder(
            table.rows[self.stage],
            most_active=most_active,
            most_kept=most_kept,
            window=window,
            early=early,
            weights_last=weights_last,
            forwards_first=forwards_first,
            last_goes_last=reduces,
        )
