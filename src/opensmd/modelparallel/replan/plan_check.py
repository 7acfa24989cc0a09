"""After the first two steps: comparing the times of the stages with the planned ones."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from statistics import quantiles
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from opensmd.modelparallel.dry_run.first_plan import FirstPlan
from opensmd.modelparallel.planning.measured import (
    WORTH_A_MOVE,
    WORTH_A_WORD,
    BetterPlan,
    StageTimes,
    better_plan,
)
from opensmd.modelparallel.planning.plan import Plan
from opensmd.modelparallel.ranks.exchange import exchange
from opensmd.modelparallel.ranks.grid import CommGroup
from opensmd.modelparallel.report.better_plan import better_plan_text

if TYPE_CHECKING:
    from opensmd.modelparallel.ranks.groups import Groups
    from opensmd.modelparallel.runtime.engine import Engine
    from opensmd.modelparallel.settings.config import Config

__all__ = ["PlanCheck"]

logger = logging.getLogger("opensmd.modelparallel")

STEPS = 2


class PlanCheck:
    """Looks at the first steps that have backwards; all ranks must call its methods alike.

    Args:
        first: the plan, and on the rank that made it also how.
        engine: follows the plan.
        cfg: the settings.
        groups: of this rank.
    """

    def __init__(self, first: FirstPlan, engine: Engine, cfg: Config, groups: Groups) -> None:
        self._over = not cfg.auto_partition and cfg.pipeline != "searched"
        self._first = first
        self._engine = engine
        self._cfg = cfg
        self._groups = groups
        self._times: list[StageTimes] = []
        self._steps = 0

    def step_has_ended(self) -> None:
        """Record a step that had backwards."""
        if self._steps < STEPS:
            self._steps += 1
            if self._engine.tells_times:
                self._times += self._engine.times_of_microbatches()

    def before_step(self) -> Plan | None:
        """Compare once the steps have been seen, where all ranks are known to continue.

        Returns:
            The plan to follow from now on, if replanning is on and another plan is better.
        """
        if self._over or self._steps < STEPS:
            return None
        self._over = True
        if not self._engine.tells_times:
            self._say_nothing_is_known()
            return None
        searches = self._cfg.pipeline == "searched"
        comparison = None
        if searches or 0 in self._groups.members(CommGroup.PP_GROUP):
            measured = self._of_all_stages()
            comparison = self._compared(measured)
            if searches:
                self._engine.follow_times(measured)
        if not self._cfg.replan:
            return None
        sent: list[Any] = [
            None if comparison is None or comparison.plan is None else comparison.plan.to_json()
        ]
        dist.broadcast_object_list(sent, group=self._groups.messages, group_src=0)
        return None if sent[0] is None else Plan.from_json(sent[0])

    def _say_nothing_is_known(self) -> None:
        if self._cfg.replan and self._groups.rank == 0:
            logger.warning(
                "replan has no effect here: the times of partitions are measured on CPUs, and only where "
                "their messages may arrive in any order, as in groups of smddp without deterministic_server"
            )

    def _of_all_stages(self) -> list[StageTimes]:
        group = self._groups[CommGroup.PP_GROUP]
        return exchange(_usual(self._times), group)

    def _compared(self, measured: Sequence[StageTimes]) -> BetterPlan | None:
        """Compare the times of all stages, on the rank that made the plan, and log the result."""
        trace, make = self._first.trace, self._first.make
        if trace is None or make is None:
            return None
        plan, replans = self._first.plan, self._cfg.replan
        worth = WORTH_A_MOVE if replans else WORTH_A_WORD
        comparison = better_plan(
            trace, plan, measured, make, microbatches=self._cfg.microbatches, worth=worth
        )
        if comparison is not None:
            level = logging.INFO if comparison.plan is None else logging.WARNING
            logger.log(level, "%s", better_plan_text(plan, measured, comparison, replans=replans))
        return comparison


def _usual(times: Sequence[StageTimes]) -> StageTimes:
    """Return a microbatch's time on an otherwise idle machine: the longest of the quickest quarter."""
    weights = [microbatch.weights for microbatch in times if microbatch.weights is not None]
    return StageTimes(
        _quarter([microbatch.forward for microbatch in times]),
        _quarter([microbatch.backward for microbatch in times]),
        _quarter(weights) if weights else None,
    )


def _quarter(seconds: Sequence[float]) -> float:
    return quantiles(seconds, n=4, method="inclusive")[0] if len(seconds) > 1 else sum(seconds)
