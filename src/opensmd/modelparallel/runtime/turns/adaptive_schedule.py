"""One rank's schedule over all steps: measured times decide what settings and plan leave open.

Three things are learnt: the times of the stages, if a search orders the work by them; how many backwards gain
from being split; and how long it is worth waiting for what the order has next.
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
    """The order of one rank's work, step after step.

    Args:
        planned: the schedule before any step has been measured.

    Attributes:
        patience: that of this rank.
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
        """Return the next step's policy; ``reduces``: replicas reduce gradients in its last backward."""
        return self._schedule.policy(microbatches, reduces=reduces)

    def splits_from(self, microbatches: int) -> int:
        """Return the microbatch from which on the next step leaves weight gradients for later."""
        return self._split_choice.splits_from(microbatches)

    def follow_times(self, measured: Sequence[StageTimes]) -> None:
        """Adapt the order to a microbatch's times on each stage; on all ranks alike."""
        self._schedule = replace(self._planned, plan=with_times(self._planned.plan, measured))
        self._split_choice = SplitChoice(self._schedule)

    def step_has_ended(self, microbatches: int, record: Record) -> None:
        """Learn from a step's times."""
        self._split_choice.step_has_ended(microbatches, record)
        self.patience.step_has_ended(
            [nanoseconds * 1e-9 for nanoseconds in record.spent("backward").values()]
        )
