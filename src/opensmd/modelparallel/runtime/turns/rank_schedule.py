"""What one rank does in which order: the settings and the plan, as a policy for each step."""

from __future__ import annotations

from dataclasses import dataclass

from opensmd.modelparallel.planning.plan import Plan
from opensmd.modelparallel.planning.schedule import (
    FixedOrder,
    Pipeline,
    Policy,
    ReadyFirst,
    split_backwards,
    window,
)

__all__ = ["RankSchedule"]


@dataclass(frozen=True, kw_only=True)
class RankSchedule:
    """The schedule of one rank.

    Attributes:
        plan: tells whether the stages are a chain, each of which gets its input from the one before.
        stage: this rank of the pipeline.
        partitions: how many there are.
        pipeline: "interleaved" or "simple".
        active_microbatches: how many microbatches may be under way at once.
        in_order: all ranks do everything in one order.
    """

    plan: Plan
    stage: int
    partitions: int
    pipeline: Pipeline
    active_microbatches: int
    in_order: bool

    @property
    def chain(self) -> bool:
        """Whether all tensors go to higher stages."""
        crossings = self.plan.crossings
        return bool(crossings) and all(crossing.source < crossing.target for crossing in crossings)

    def policy(self, microbatches: int, *, reduces: bool) -> Policy:
        """Who goes on in a step; ``reduces``: replicas reduce gradients in its last backward."""
        size = window(
            partitions=self.partitions,
            stage=self.stage,
            chain=self.chain and not self.in_order,
            active_microbatches=self.active_microbatches,
        )
        if self.in_order:
            return FixedOrder(self.pipeline, size, microbatches)
        return ReadyFirst(self.pipeline, size, last_goes_last=reduces)

    def splits_from(self, microbatches: int, *, reduces: bool) -> int:
        """The microbatches from this one on leave their weight gradients for later.

        With replicas that is the last one alone: their reducer counts the gradients of one backward.
        """
        if self.in_order:
            return microbatches
        return microbatches - split_backwards(
            stage=self.stage,
            chain=self.chain,
            most=1 if reduces else self.active_microbatches,
            microbatches=microbatches,
        )
