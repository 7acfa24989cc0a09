"""A model that goes on: over other process groups, or by another plan, with new replicas in either case."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

import torch.distributed as dist

from opensmd.modelparallel.dry_run.first_plan import FirstPlan
from opensmd.modelparallel.planning.plan import Plan
from opensmd.modelparallel.ranks.grid import CommGroup
from opensmd.modelparallel.replan.moving import replan
from opensmd.modelparallel.replan.plan_check import PlanCheck
from opensmd.modelparallel.replicas.reducer import CommHook, Replicas
from opensmd.modelparallel.replicas.together import ReplicasTogether
from opensmd.modelparallel.report.table import print_plan
from opensmd.modelparallel.runtime.engine import Engine
from opensmd.modelparallel.runtime.whole_model import WholeModel
from opensmd.modelparallel.sharding.make_replicas import make_replicas
from opensmd.modelparallel.sharding.sharded_parameters import ShardedParameters
from opensmd.modelparallel.state import state
from opensmd.modelparallel.state_dicts.model_state import ModelState

__all__ = ["RegroupedModel"]


class RegroupedModel(ModelState):
    """A module with what runs it: an engine if it is split, replicas if there are several."""

    _engine: Engine | None  # None for a model in one partition
    _runner: Engine | WholeModel | None  # of steps; None until the parts have their places
    _replicas: Replicas | ReplicasTogether | None
    _plan_check: PlanCheck | None
    _sharded: ShardedParameters | None
    _replica_options: dict[str, Any]
    _comm_hooks: list[tuple[Any, CommHook]]
    _known_plan: Plan | None  # agreed upon, though not all parts may have their places yet
    joining: bool

    @abstractmethod
    def _place_by(self, first: FirstPlan) -> None:
        """Give all parts of the model their places, and make what runs them, but for replicas."""

    def leave_groups(self) -> None:
        """Use no process group any more; :meth:`enter_groups` comes next."""
        if isinstance(self._replicas, Replicas):
            self._replicas.close()
        self._replicas = self._plan_check = None
        if self._runner is not None:
            self._runner.reducer = None

    def enter_groups(self, *, equal: bool) -> None:
        """Go on over the groups of the state, by the plan of those that have one; collective over all ranks.

        Args:
            equal: give all replicas the first one's parameters and buffers.
        """
        plan = self._plan_of_others()
        if plan is None:  # nobody has come through the first step's beginning
            return
        if not self.partitioned:
            self._place_by(FirstPlan(plan))
            self._plan_check = None
        else:
            if self._engine is not None:
                self._engine.follow_group(self.get_module(), state.groups[CommGroup.PP_GROUP])
            self.follow_plan(plan)
            state.follow_groups()
        self._make_replicas(equal=equal)

    def _plan_of_others(self) -> Plan | None:
        """The plan, and which parameters are trained: of the first rank that knows."""
        own = None
        if self._known_plan is not None:
            own = self._known_plan.to_json(), [each.requires_grad for each in self.get_module().parameters()]
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, own, group=state.groups.messages)
        found = next((each for each in everyone if each is not None), None)
        if found is None:
            return None
        if own is None:
            for parameter, trained in zip(self.get_module().parameters(), found[1], strict=True):
                parameter.requires_grad_(trained)
        self._known_plan = Plan.from_json(found[0])
        return self._known_plan

    def _make_replicas(self, *, equal: bool = True) -> None:
        if state.cfg.ddp and state.groups[CommGroup.DP_GROUP].size() > 1:
            options = {**self._replica_options, "comm_hooks": self._comm_hooks, "equal": equal}
            self._replicas = make_replicas(self, self._sharded, options)
            if self._runner is not None:
                self._runner.reducer = self._replicas

    def _compare_with_plan(self, engine: Engine) -> None:
        """Before the third step: what the first two have taken; go on by a better plan if asked to."""
        plan = None if self._plan_check is None or self.joining else self._plan_check.before_step()
        if plan is not None and replan(self, engine, plan):
            self._make_replicas()
            if state.rank == 0:
                print_plan(plan)
