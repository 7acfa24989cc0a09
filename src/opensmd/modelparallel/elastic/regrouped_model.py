"""A model that continues with other process groups or another plan, and new replicas in either case."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

from opensmd.modelparallel.dry_run.first_plan import FirstPlan
from opensmd.modelparallel.planning.plan import Plan
from opensmd.modelparallel.ranks.exchange import exchange
from opensmd.modelparallel.ranks.grid import CommGroup
from opensmd.modelparallel.replan.moving import replan
from opensmd.modelparallel.replan.plan_check import PlanCheck
from opensmd.modelparallel.replicas.comm_hook import CommHook
from opensmd.modelparallel.replicas.reducer import Replicas
from opensmd.modelparallel.replicas.together import ReplicasTogether
from opensmd.modelparallel.report.table import print_plan
from opensmd.modelparallel.runtime.engine import Engine
from opensmd.modelparallel.runtime.same_model import require_same_model
from opensmd.modelparallel.runtime.whole_model import WholeModel
from opensmd.modelparallel.sharding.make_replicas import make_replicas
from opensmd.modelparallel.sharding.sharded_parameters import ShardedParameters
from opensmd.modelparallel.state import state
from opensmd.modelparallel.state_dicts.model_state import ModelState

__all__ = ["RegroupedModel"]


class RegroupedModel(ModelState):
    """A module with what runs it: an engine if split, and replicas if there are several."""

    _engine: Engine | None  # None for a single partition
    _runner: Engine | WholeModel | None  # runs steps; None until the model is placed
    _replicas: Replicas | ReplicasTogether | None
    _plan_check: PlanCheck | None
    _sharded: ShardedParameters | None
    _replica_options: dict[str, Any]
    _comm_hooks: list[tuple[Any, CommHook]]
    _known_plan: Plan | None  # agreed upon, even if not all parts are placed yet
    joining: bool
    _is_half_placed = False  # its parts are getting their places, or something has failed meanwhile

    @abstractmethod
    def _place_by(self, first: FirstPlan) -> None:
        """Place all parts of the model, and create what runs them, except replicas."""

    def leave_groups(self) -> None:
        """Stop using any process group; :meth:`enter_groups` comes next."""
        if isinstance(self._replicas, Replicas):
            self._replicas.close()
        self._replicas = self._plan_check = None
        if self._runner is not None:
            self._runner.reducer = None

    def enter_groups(self, *, equal: bool) -> None:
        """Continue with the state's groups and the plan of a rank that has one; all ranks must call.

        Args:
            equal: give all replicas the first one's parameters and buffers.
        """
        plan = self._plan_of_others()
        if plan is None:  # nobody has got past the start of the first step
            return
        if not self.partitioned:
            pipeline = state.groups[CommGroup.PP_GROUP]
            require_same_model(self.get_module(), pipeline, sliced=self.shards)
            self._place_by(FirstPlan(plan))
            self._plan_check = None
        else:
            if self._engine is not None:
                self._engine.follow_group(self.get_module(), state.groups[CommGroup.PP_GROUP])
            self.follow_plan(plan)
            self.share_what_is_everywhere()  # new replicas have all buffers on all ranks
            state.follow_groups()
        self._make_replicas(equal=equal)

    def _plan_of_others(self) -> Plan | None:
        """Return the plan, and which parameters are trained, from the first rank that knows."""
        own = None
        if self._known_plan is not None:
            trained = [parameter.requires_grad for parameter in self.get_module().parameters()]
            own = self._known_plan.to_json(), trained
        everyone = exchange(own, state.groups.messages)
        known = next((answer for answer in everyone if answer is not None), None)
        if known is None:
            return None
        if own is None:
            for parameter, is_trained in zip(self.get_module().parameters(), known[1], strict=True):
                parameter.requires_grad_(is_trained)
        self._known_plan = Plan.from_json(known[0])
        return self._known_plan

    def _make_replicas(self, *, equal: bool = True) -> None:
        if state.cfg.ddp and state.groups[CommGroup.DP_GROUP].size() > 1:
            options = {**self._replica_options, "comm_hooks": self._comm_hooks, "equal": equal}
            self._replicas = make_replicas(self, self._sharded, options)
            if self._runner is not None:
                self._runner.reducer = self._replicas
        self._is_half_placed = False

    def _compare_with_plan(self, engine: Engine) -> None:
        """Before the third step, compare the first two with the plan; switch to a better one if requested."""
        plan = None if self._plan_check is None or self.joining else self._plan_check.before_step()
        if plan is not None and replan(self, engine, plan):
            self._make_replicas()
            if state.rank == 0:
                print_plan(plan)
