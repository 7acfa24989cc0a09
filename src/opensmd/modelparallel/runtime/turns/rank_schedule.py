"""The order of one rank's work: a policy for each step, from the settings and the plan."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial

from opensmd.modelparallel.planning.plan import Plan
from opensmd.modelparallel.planning.policies.fixed_order import FixedOrder
from opensmd.modelparallel.planning.policies.limits import (
    forwards_ahead,
    split_backwards,
    splits_at_the_end,
    window,
)
from opensmd.modelparallel.planning.policies.policy import Policy
from opensmd.modelparallel.planning.policies.table_order import TableOrder
from opensmd.modelparallel.planning.schedules.fill_drain import fill_drain
from opensmd.modelparallel.planning.schedules.names import Pipeline
from opensmd.modelparallel.planning.schedules.one_forward_one_backward import (
    interleaved,
    one_forward_one_backward,
)
from opensmd.modelparallel.planning.schedules.playing import play
from opensmd.modelparallel.planning.schedules.searched import searched
from opensmd.modelparallel.planning.schedules.tables import Action, ChunkTimes, Table, fused, looped
from opensmd.modelparallel.planning.schedules.v import zero_bubble_v
from opensmd.modelparallel.planning.schedules.zero_bubble import zero_bubble, zero_bubble_h1, zero_bubble_h2

__all__ = ["RankSchedule"]


def _kept(table: Table) -> list[int]:
    return play(table, {"F": 1.0, "B": 1.0, "W": 1.0}).kept


def _fused_v(ranks: int, microbatches: int) -> Table:
    return fused(zero_bubble_v(ranks, microbatches))


def _searched(times: Sequence[ChunkTimes], microbatches: int, most_kept: int) -> Table:
    return searched(looped(len(times)), times, microbatches, most_kept=most_kept)


def _searched_v(times: Sequence[ChunkTimes], microbatches: int) -> Table:
    """Search for two equal chunks per rank, within the memory of 1F1B's first rank."""
    ranks = len(times)
    stages = _fused_v(ranks, microbatches).stages
    limits = [ranks * len(own) for own in stages]
    halves = [whole.shared_out(2) for whole in times[:-1]]
    return searched(stages, [*halves, times[-1], *reversed(halves)], microbatches, most_kept=limits)


def _itself(search: Callable[[], Table]) -> Table:
    return search()


@dataclass(frozen=True, kw_only=True)
class RankSchedule:
    """The schedule of one rank.

    Attributes:
        plan: tells which stages send to which.
        stage: this rank's position in the pipeline.
        partitions: the number of partitions.
        pipeline: the setting.
        active_microbatches: how many microbatches may be in flight.
        in_order: whether all ranks do everything in one order.
        virtual_stages: the number of stages per rank.
        common: makes a search's result the same on all ranks, which call it together, so one may search for
            all.
    """

    plan: Plan
    stage: int
    partitions: int
    pipeline: Pipeline
    active_microbatches: int
    in_order: bool
    virtual_stages: int = 1
    common: Callable[[Callable[[], Table]], Table] = _itself

    @cached_property
    def _found(self) -> dict[int, Table]:
        """The results of searches, by the number of microbatches."""
        return {}

    @cached_property
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
        return any(
            crossing.source == self.partitions - 1 and crossing.target == 0
            for crossing in self.plan.crossings
        )

    def policy(self, microbatches: int, *, reduces: bool) -> Policy:
        """Return a step's policy; ``reduces``: replicas reduce gradients in its last backward."""
        kind = microbatches, reduces
        if kind not in self._policies:
            self._policies[kind] = self._make_policy(microbatches, reduces)
        return self._policies[kind]()

    @cached_property
    def _policies(self) -> dict[tuple[int, bool], Callable[[], Policy]]:
        """What creates a policy per step, by the kind of step."""
        return {}

    def _make_policy(self, microbatches: int, reduces: bool) -> Callable[[], Policy]:
        if self.in_order:
            ahead = self._window if self.pipeline != "simple" else microbatches
            return partial(FixedOrder, ahead, microbatches)
        follow = partial(TableOrder, last_goes_last=reduces)
        if self.pipeline == "simple":
            row = self._row_of(fill_drain(self.partitions, microbatches))
            return partial(follow, row, most_active=math.inf, forwards_first=True)
        chunked = self._chunked(microbatches)
        if chunked is not None:
            # Weight gradients without a place in the table fill waits, within the table's memory.
            return partial(
                follow,
                self._row_of(chunked),
                most_active=math.inf,
                most_kept=math.inf if chunked.splits else _kept(chunked)[self.stage],
                early=False,
                weights_last=not chunked.splits,
            )
        active = self.active_microbatches
        if self.pipeline == "zero_bubble" and self.chain and active >= 2 * self.partitions - 1:
            row = self._row_of(zero_bubble_h2(self.partitions, microbatches))
            kept = 2 * self.partitions - 1
            return partial(follow, row, most_active=active, most_kept=kept, weights_last=False)
        if self.pipeline == "searched" and self.chain:
            row = self._row_of(self._search(_searched, microbatches, active))
            return partial(follow, row, most_active=active, most_kept=active, early=False, weights_last=False)
        if self.pipeline != "1f1b" and self.chain and active >= self.partitions:
            ahead = forwards_ahead(self.partitions, active)
            row = self._row_of(zero_bubble(self.partitions, microbatches, more=ahead))
            return partial(follow, row, most_active=math.inf, early=False, weights_last=False)
        # No chain, or too little memory for the tables above; here a row is only an order of preference.
        make = one_forward_one_backward if self.pipeline == "1f1b" else zero_bubble_h1
        row = self._row_of(make(self.partitions, microbatches))
        return partial(follow, row, most_active=active, most_kept=active, window=self._window)

    def _row_of(self, table: Table) -> Sequence[Action]:
        return table.rows[self.stage]

    def most_split(self, microbatches: int) -> int:
        """Return how many of a step's last backwards may be split."""
        if self.pipeline == "1f1b":
            return 0
        few = self.pipeline == "simple" or (self.measures_splits and self.chain and self.partitions == 2)
        most = self.few_split if few else microbatches
        return split_backwards(stage=self.stage, chain=self.chain, most=most, microbatches=microbatches)

    @property
    def few_split(self) -> int:
        """Return how many to split if splitting more costs more than it gains."""
        return splits_at_the_end(
            stage=self.stage,
            partitions=self.partitions,
            chain=self.chain,
            active_microbatches=self.active_microbatches,
        )

    @property
    def measures_splits(self) -> bool:
        """Whether to split only as many as measurements justify; other schedules always split."""
        if self.in_order:
            return False
        return self.in_a_v or (self.pipeline in ("interleaved", "simple") and self.virtual_stages == 1)

    @property
    def in_a_v(self) -> bool:
        """Whether both the order and the plan are those of a V."""
        return self.pipeline == "v" and self._comes_back

    @property
    def _times(self) -> tuple[ChunkTimes, ...]:
        """Return the times of the stages from the plan; equal times if unknown."""
        loads = self.plan.loads
        if not any(load.seconds for load in loads):
            return (ChunkTimes(1.0, 1.0, 1.0),) * self.partitions
        return tuple(load.times for load in loads)

    @property
    def _window(self) -> int:
        return window(
            partitions=self.partitions,
            stage=self.stage,
            chain=self.chain and not self.in_order,
            active_microbatches=self.active_microbatches,
        )

    def _chunked(self, microbatches: int) -> Table | None:
        """Return the table for several stages per rank, if the plan has these and memory allows."""
        ranks = self.partitions
        if self.active_microbatches < ranks:
            return None
        if self.in_a_v:
            return _fused_v(ranks, microbatches)
        if self.pipeline == "searched" and self.virtual_stages > 1 and self._comes_back:
            return self._search(_searched_v, microbatches)
        if self.pipeline == "interleaved" and self._goes_round and microbatches % ranks == 0:
            return interleaved(ranks, microbatches, chunks=self.virtual_stages)
        return None

    def _search(self, search: Callable[..., Table], microbatches: int, *memory: int) -> Table:
        if microbatches not in self._found:
            self._found[microbatches] = self.common(partial(search, self._times, microbatches, *memory))
        return self._found[microbatches]
