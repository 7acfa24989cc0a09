"""All of ``smp.DistributedModel`` except its steps: its base class.

Whereabouts knows what lives here, StateDicts saves and loads it, Moves moves it; this file adds what happens
at certain moments, such as hooks.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from opensmd.modelparallel._torch_internals import without_interception
from opensmd.modelparallel.compatibility.clipping import watch_total_norms
from opensmd.modelparallel.compatibility.left_behind import require_trained
from opensmd.modelparallel.exceptions import SMPError
from opensmd.modelparallel.planning.plan import Plan
from opensmd.modelparallel.ranks.grid import CommGroup
from opensmd.modelparallel.redirection._torch_internals import before_optimizer_steps, let_optimizers_ask
from opensmd.modelparallel.state import state
from opensmd.modelparallel.state_dicts.moves import Moves
from opensmd.modelparallel.tensor_parallel.clipping import clip_by_whole_tensors
from opensmd.optim.param_groups import params_of

__all__ = ["ModelState"]

Hook = Callable[[Any, Any], Any]


class ModelState(Moves):
    """A module with hooks that run when it is partitioned and when a step ends.

    Args:
        module: the user's module.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module)
        self._post_partition_hooks: dict[int, Hook] = OrderedDict()
        self._post_step_hooks: dict[int, Hook] = OrderedDict()

    def current(self, parameter: nn.Parameter) -> nn.Parameter:
        """Return what the model now has in place of an earlier parameter; a subclass may shard some."""
        return parameter

    def has_replaced(self, parameter: nn.Parameter) -> bool:
        """Whether the model has another in the place of a parameter that it had when it was wrapped."""
        return self.current(parameter) is not parameter

    def require_whole_batch(self, name: str) -> None:
        """Refuse ``name``, which needs the gradients of a whole batch, in one of several microbatches.

        Raises:
            SMPError: a step with several microbatches is running.
        """
        if self.running > 1:
            raise SMPError(
                f"{name} was called inside a smp.step function, which runs for each of {self.running} "
                "microbatches, whose gradients add up. Call it before or after the step"
            )

    def require_other_parameters(self, optimizer: torch.optim.Optimizer, name: str) -> None:
        """Refuse ``name`` of an optimizer, wrapped or not, if it has parameters of this model.

        Raises:
            SMPError: it has some, and a step with several microbatches is running.
        """
        if self.running <= 1:  # the usual case: optimizers step between steps
            return
        own = {id(parameter) for parameter in self.get_module().parameters()}
        if any(id(parameter) in own for parameter in params_of(optimizer.param_groups)):
            self.require_whole_batch(name)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Zero the gradients as in torch, but between steps.

        Raises:
            SMPError: inside a step with several microbatches.
        """
        self.require_whole_batch("model.zero_grad")
        with without_interception():
            super().zero_grad(set_to_none)

    def register_post_partition_hook(self, hook: Hook) -> RemovableHandle:
        """Run ``hook(model, optimizer)`` after partitioning, before the first forward.

        A hook that is registered later runs at once.

        Raises:
            TypeError: ``hook`` is not a function.
        """
        _check_hook("register_post_partition_hook", hook)
        handle = RemovableHandle(self._post_partition_hooks)
        if self.partitioned:
            hook(self, state.optimizer)
        else:
            self._post_partition_hooks[handle.id] = hook
        return handle

    def register_post_step_hook(self, hook: Hook) -> RemovableHandle:
        """Run ``hook(model, optimizer)`` once, at the end of the next step.

        Raises:
            TypeError: ``hook`` is not a function.
        """
        _check_hook("register_post_step_hook", hook)
        handle = RemovableHandle(self._post_step_hooks)
        self._post_step_hooks[handle.id] = hook
        return handle

    def _fill_delayed(self, plan: Plan) -> None:
        """Give delayed parameters their values, where they live."""
        if self.delayed:
            stage = state.groups.rank_in(CommGroup.PP_GROUP)
            names = {id(parameter): name for name, parameter in self.get_module().named_parameters()}
            self.delayed.fill(lambda parameter: plan.parameter_home(names[id(parameter)]) == stage)

    def finish_partition(self, plan: Plan) -> None:
        """Load pending state dicts, cut the optimizers and run the hooks; called when the model is placed."""
        self.follow_plan(plan)
        self.share_what_is_everywhere()
        self._make_common_parts_equal()
        if self.shards:
            state.undoing.append(clip_by_whole_tensors(self.sliced_parameters))
        if len(state.groups.owner_stages) > 1:
            state.undoing.append(watch_total_norms())
        state.undoing.append(
            before_optimizer_steps(lambda optimizer: require_trained(optimizer, self.has_replaced))
        )
        # From now on: patching torch's class for each step alone would change it twice per step.
        state.undoing.append(let_optimizers_ask(self.require_other_parameters))
        self._load_what_waited()
        state.cut_optimizers(self)
        hooks = list(self._post_partition_hooks.values())
        self._post_partition_hooks.clear()
        for hook in hooks:
            hook(self, state.optimizer)

    def follow_plan(self, plan: Plan) -> None:
        """Note where everything lives from now on; all ranks must call."""
        self.plan = plan
        homes = {self.home_of(name) for name, _ in self.get_module().named_parameters(remove_duplicate=False)}
        if homes:
            state.groups.split_off_owners(sorted(homes))
        self._split_modules = frozenset(plan.split())

    def finish_step(self) -> None:
        """Run the pending post-step hooks; the engine calls this at the end of each step."""
        hooks = list(self._post_step_hooks.values())
        self._post_step_hooks.clear()
        for hook in hooks:
            hook(self, state.optimizer)


def _check_hook(name: str, hook: object) -> None:
    if not callable(hook):
        raise TypeError(f"model.{name}: expected a function of (model, optimizer), got {hook!r}")
