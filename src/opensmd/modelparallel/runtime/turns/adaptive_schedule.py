"""One rank's schedule over all steps: what settings and plan leave open is decided by what steps have taken.

Three things are learnt: what the stages take, where a search orders the work by it; how many backwards gain
by running in two parts; and how long it is worth waiting for what the order has next.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from opensmd.modelparallel.planning.measured import StageTimes, with_times
from opensmd.modelparallel.planning.policies.patience import Patience
from opensmd.modelparallel.planning.policies.policy import Policy
from opensmd.modelparallel.runtime.turns.rank_schedule import RankSchedule
from opensmd.modelparallel.runtime.turns.record import Record
from opensmd.modelparallel.runtime.turns.split_choice import SplitChoice

__all__ = ["AdaptiveSchedule"]


class AdaptiveSchedule:
    """What one rank does in which order, step after step.

    Args:
        planned: the schedule before any step has been measured.

    Attributes:
        patience: of this rank.
    """

    def __init__(self, planned: RankSchedule) -> None:
        self._planned = planned
        self._schedule = planned
        self._split_choice = SplitChoice(planned)
        self.patience = Patience()

    @property
    def in_order(self) -> bool:
        """Whether all ranks do everything in one order."""
        return self._planned.in_order

    def policy(self, microbatches: int, *, reduces: bool) -> Policy:
        """Who goes on in the next step; ``reduces``: replicas reduce gradients in its last backward."""
        return self._schedule.policy(microbatches, reduces=reduces)

    def splits_from(self, microbatches: int) -> int:
        """The microbatches of the next step from this one on leave their weight gradients for later."""
        return self._split_choice.splits_from(microbatches)

    def follow_times(self, measured: Sequence[StageTimes]) -> None:
        """Let the order follow what a microbatch takes on each stage; on all ranks alike."""
        self._schedule = replace(self._planned, plan=with_times(self._planned.plan, measured))
        self._split_choice = SplitChoice(self._schedule)

    def step_has_ended(self, microbatches: int, record: Record) -> None:
        """Learn from a step what it has taken."""
        self._split_choice.step_has_ended(microbatches, record)
        self.patience.step_has_ended([each * 1e-9 for each in record.spent("backward").values()])
