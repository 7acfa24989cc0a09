"""``smp.DistributedOptimizer``: the given optimizer, cut to this rank's parameters, with whole state dicts.

The optimizer stays the same object, so learning-rate schedulers accept it; its class becomes one in which the
methods below override its own. When the model is partitioned, parameters of other ranks leave its groups and
state. A *layout* remembers, for every group, the numbers that plain PyTorch gives its parameters. State dicts
use these numbers, so a full one is interchangeable with plain PyTorch's.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import torch

from opensmd.modelparallel._torch_internals import runs_step_hooks, without_interception
from opensmd.modelparallel.communicate import meet_for, meet_sharing_tensors, require_meeting
from opensmd.modelparallel.dry_run.capture import is_tracing
from opensmd.modelparallel.exceptions import SMPError
from opensmd.modelparallel.precision._torch_internals import foreign_scaler_asks
from opensmd.modelparallel.precision.half_optimizer import HalfMethods
from opensmd.modelparallel.precision.layout import Layout, names_in
from opensmd.modelparallel.precision.loss_scale import (
    dynamic_arguments,
    require_one_scale,
    shared_loss_scale,
)
from opensmd.modelparallel.precision.masters_in_state_dicts import split_masters
from opensmd.modelparallel.precision.optimizer_attributes import PrecisionAttributes, require_norm
from opensmd.modelparallel.ranks.grid import CommGroup
from opensmd.modelparallel.redirection._torch_internals import follow_class
from opensmd.modelparallel.redirection.overriding_class import override
from opensmd.modelparallel.runtime.calls.interception import beside_the_program
from opensmd.modelparallel.runtime.tensors.before_writing import before_writing
from opensmd.modelparallel.runtime.tensors.tags import count_changes
from opensmd.modelparallel.sharding.sharded_optimizer import ShardedMethods, require_elementwise
from opensmd.modelparallel.sharding.sharded_parameter_optimizer import ShardedParameterMethods
from opensmd.modelparallel.state import state
from opensmd.modelparallel.state_dicts.fitting import (
    has_parameters_shapes,
    require_optimizer_state,
    require_same_groups,
    require_same_kind,
    require_same_shapes,
)
from opensmd.modelparallel.state_dicts.laid_out import lay_out_state
from opensmd.modelparallel.state_dicts.merge import COUNT, FLAT, PARTIAL, SLICES, is_partial
from opensmd.modelparallel.state_dicts.moved_state import move_state
from opensmd.modelparallel.state_dicts.optimizer_entries import (
    gathered_entries,
    merged_parts,
    require_same_numbers,
    sliced_entries,
    slices_of_entries,
    unsliced_state,
)
from opensmd.modelparallel.tensor_parallel.huggingface.optimizer_state import fitting_state
from opensmd.modelparallel.tensor_parallel.whole_parameters import require_slices_suffice
from opensmd.modelparallel.wrapped import WrappedModel
from opensmd.optim.param_groups import params_of
from opensmd.script_level import script_level

__all__ = ["DistributedOptimizer"]


class _Methods(PrecisionAttributes):
    """What a distributed optimizer does differently; a mixin that precedes the optimizer's own class."""

    defaults: dict[str, Any]
    state: Any
    _smp_warned_of_scaler = False

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """The flag that GradScaler.step looks for on every optimizer; torch's fused ones set it."""
        if foreign_scaler_asks():
            require_one_scale()
            self._smp_warn_of_scaler()
        return bool(self.__dict__.get("_step_supports_amp_scaling", False))

    @_step_supports_amp_scaling.setter
    def _step_supports_amp_scaling(self, value: bool) -> None:
        self.__dict__["_step_supports_amp_scaling"] = value

    def _smp_warn_of_scaler(self) -> None:
        if self._smp_warned_of_scaler or len(state.groups.owner_stages) == 1:
            return
        self._smp_warned_of_scaler = True
        warnings.warn(
            "torch's GradScaler sees the gradients of this rank alone: if they overflow on one partition, "
            "only that one skips the step, and the partitions get out of step. Use smp.amp.GradScaler, which "
            "takes the same arguments",
            stacklevel=script_level(),
        )

    @property
    def optimizer(self) -> Any:
        """What a wrapper such as Lookahead wraps; else the optimizer itself, for learning-rate schedulers."""
        return self.__dict__.get("optimizer", self)

    @optimizer.setter
    def optimizer(self, value: Any) -> None:
        self.__dict__["optimizer"] = value

    def local_state_dict(self, *, gather_if_shard: bool = True) -> dict[str, Any]:
        """Return this rank's state under the whole optimizer's numbers, with ``_smp_is_partial: True``.

        ``gather_if_shard`` is accepted and ignored: without ``shard_optimizer_state`` nothing is sharded.

        Raises:
            SMPError: the model has not been partitioned yet, or it is split and a step is running; or the
                optimizers are of each rank's own parameters.
        """
        require_meeting("optimizer.local_state_dict()")
        if self._smp_layout is None:
            raise SMPError(
                "local_state_dict() works once the model is partitioned, which the first call of a smp.step "
                "function does"
            )
        if self._smp_layout.is_of_one_rank and state.groups.size(CommGroup.PP_GROUP) > 1:
            meet_for("optimizer.local_state_dict()")
            require_same_numbers(self._smp_layout, "optimizer.local_state_dict()")
        own = self._smp_renumbered(self._smp_layout)
        if state.cfg.tensor_parallel_degree > 1:
            own[SLICES] = slices_of_entries(own["state"], self._smp_layout)
        return {**own, PARTIAL: True}

    def state_dict(self, *, gather_to_rank0: bool = False) -> dict[str, Any]:
        """Return the whole optimizer's state, as plain PyTorch would; all ranks of the replica must call.

        Args:
            gather_to_rank0: only rank 0 of the replica gets it; the others get an empty dict.

        Raises:
            SMPError: inside a step of a split model.
        """
        require_meeting("optimizer.state_dict()")
        if self._smp_layout is not None or state.cfg.tensor_parallel_degree > 1:
            sharded = state.cfg.shard_optimizer_state or state.cfg.shards_parameters
            meet_for("optimizer.state_dict()", shards=sharded and self._smp_layout is not None)
        if self._smp_layout is None:
            return unsliced_state(self._smp_plain_state_dict(), self)
        own = self._smp_renumbered(self._smp_layout)
        if state.groups.size(CommGroup.MP_GROUP) > 1:
            own["state"] = gathered_entries(own["state"], self._smp_layout, only_first=gather_to_rank0)
        return {} if gather_to_rank0 and state.groups.rank_in(CommGroup.MP_GROUP) != 0 else own

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load a full state dict (also plain PyTorch's) or, on all ranks of the replica, a partial one.

        The state of a Hugging Face model is translated if distributed modules have replaced it.

        Raises:
            TypeError: ``state_dict`` is no dict.
            ValueError: it is of another kind of optimizer, or its groups or the shapes of its tensors do not
                fit this optimizer's; nothing has been changed.
            SMPError: inside a step of a split model.
        """
        require_meeting("optimizer.load_state_dict")
        if is_partial(state_dict) or self._smp_layout is not None:
            meet_for("optimizer.load_state_dict()")
        before_writing()
        saved = self._smp_fitting(state_dict)
        _, saved = split_masters(saved)
        if self._smp_layout is not None:
            saved = self._smp_localised(saved, self._smp_layout)
        super().load_state_dict(saved)  # type: ignore[misc]
        lay_out_state(self.state)

    def _smp_fitting(self, state_dict: Mapping[str, Any]) -> dict[str, Any]:
        """Return the full state dict of a full or partial one, if it fits; see ``load_state_dict``."""
        if not isinstance(state_dict, Mapping):
            raise TypeError(
                f"optimizer.load_state_dict: expected a state dict, got {type(state_dict).__name__}"
            )
        saved = {name: value for name, value in state_dict.items() if name not in (FLAT, COUNT)}
        if is_partial(saved):
            saved = merged_parts(saved)
        saved.pop(PARTIAL, None)
        saved.pop(SLICES, None)
        require_optimizer_state(saved)
        if state.model is not None:
            saved = fitting_state(state.model.get_module(), saved, self._smp_names_of_groups())
        require_same_groups(self._smp_group_sizes(), saved)
        require_same_kind(self, saved)  # type: ignore[arg-type]
        if state.model is not None and state.cfg.tensor_parallel_degree > 1:
            parameters = params_of(self.param_groups)
            saved["state"] = sliced_entries(
                saved, self._smp_names(), state.model.shards, self._smp_layout, parameters
            )
        if has_parameters_shapes(self):  # type: ignore[arg-type]
            require_same_shapes(self._smp_shapes(), saved)
        return saved

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Zero the gradients as in torch, but between steps.

        Raises:
            SMPError: inside a step with several microbatches.
        """
        if state.model is not None:
            state.model.require_whole_batch("optimizer.zero_grad")
        with without_interception():  # ranks have different numbers of parameters
            super().zero_grad(set_to_none)  # type: ignore[misc]

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group; after partitioning, keep only this rank's parameters of it.

        Raises:
            ValueError: after partitioning, if a parameter is not the model's; the group is not added.
        """
        super().add_param_group(param_group)  # type: ignore[misc]
        if self._smp_layout is not None:
            try:
                self._smp_layout.cut(self.param_groups[-1], self.state)
            except ValueError:
                self.param_groups.pop()
                raise

    def _smp_counts_here(self, parameter: torch.nn.Parameter) -> bool:
        """Whether this rank contributes a parameter or master to sums over the ranks of the replica."""
        layout = self._smp_layout
        if layout is None:
            return True
        return layout.model.counts_here(layout.full_names[layout.local[id(parameter)]])

    def _smp_names(self) -> list[str]:
        """Return the module's names of all parameters, in the whole optimizer's order."""
        if self._smp_layout is not None:
            return self._smp_layout.full_names
        if state.model is None:
            raise SMPError("parameters have names once smp.DistributedModel has wrapped their model")
        return names_in(state.model, params_of(self.param_groups))

    def _smp_names_of_groups(self) -> list[list[str]]:
        """Return the module's names of all parameters, group by group."""
        names = iter(self._smp_names())
        return [[next(names) for _ in range(size)] for size in self._smp_group_sizes()]

    def _smp_after_partition(self, model: WrappedModel) -> None:
        if self._smp_layout is None:
            self._smp_layout = layout = Layout(model)
            for group in self.param_groups:
                layout.cut(group, self.state)
            if hasattr(self, "norm_group"):
                self.norm_group = state.groups.owners
            elif self.defaults.get("max_grad_norm") and len(state.groups.owner_stages) > 1:
                self._smp_warn_of_own_clipping()

    def _smp_warn_of_own_clipping(self) -> None:
        limit = self.defaults["max_grad_norm"]
        warnings.warn(
            f"smp.DistributedOptimizer: {type(self).__name__} clips gradients itself "
            f"(max_grad_norm={limit}), by the norm of this rank's gradients alone, not by that of the "
            "whole model. Give it max_grad_norm=None (or 0, whichever it knows) and call "
            f"optimizer.clip_master_grads({limit}) before optimizer.step()",
            stacklevel=script_level(),
        )

    def _smp_follow_device(self) -> None:
        move_state(self.state, self.param_groups)

    def _smp_follow_groups(self) -> None:
        if self._smp_layout is not None and hasattr(self, "norm_group"):
            self.norm_group = state.groups.owners

    def _smp_follow_plan(self) -> None:
        if self._smp_layout is not None:
            self._smp_layout.follow_plan(self.param_groups, self.state)

    def _smp_plain_state_dict(self) -> dict[str, Any]:
        plain: dict[str, Any] = super().state_dict()  # type: ignore[misc]
        return plain

    def _smp_renumbered(self, layout: Layout) -> dict[str, Any]:
        """Return the plain state dict of this rank's parameters, under the whole optimizer's numbers.

        Raises:
            SMPError: the optimizer's state dicts are not like torch's.
        """
        plain = self._smp_plain_state_dict()
        if not {"state", "param_groups"} <= plain.keys():
            raise SMPError(
                f"the state dicts of {type(self).__name__} have a form of their own "
                f"({', '.join(map(str, plain))}), so smp cannot put the partitions' together. If it wraps "
                "another, wrap what smp.DistributedOptimizer returns for that; its state dicts are whole"
            )
        return layout.renumbered(plain, self.param_groups)

    def _smp_localised(self, saved: dict[str, Any], layout: Layout) -> dict[str, Any]:
        """Return this rank's part of a full state dict, under the numbers of its own parameters."""
        return layout.localised(saved, self.param_groups)

    def _smp_group_sizes(self) -> list[int]:
        if self._smp_layout is None:
            return [len(group["params"]) for group in self.param_groups]
        return [len(numbers) for numbers in self._smp_layout.numbers]

    def _smp_shapes(self) -> list[torch.Size]:
        if self._smp_layout is None:
            return [parameter.shape for parameter in params_of(self.param_groups)]
        return self._smp_layout.shapes


class _InStep:
    """Overrides of the methods that a step function of one microbatch may call.

    Each rank trains its own parameters, and ranks have different numbers of them. So this is not part of the
    program that all ranks run alike.
    """

    @runs_step_hooks
    def step(self, *args: Any, **kwargs: Any) -> Any:
        """Step, except in the dry run, which has no gradients.

        Raises:
            SMPError: other ranks of the tensor-parallel group have called something else.
        """
        if is_tracing():
            return None
        with beside_the_program() as aside:
            if not aside:
                meet_sharing_tensors("optimizer.step()")
            result = super().step(*args, **kwargs)  # type: ignore[misc]
        if aside and state.model is not None:
            parameters = dict(state.model.get_module().named_parameters())
            count_changes(parameters[name] for name in self._smp_names())  # type: ignore[attr-defined]
        return result

    def clip_master_grads(self, max_norm: float) -> float:
        """Clip, or return 0.0 in the dry run, which has no gradients.

        Raises:
            TypeError: ``max_norm`` is not a number.
            ValueError: ``max_norm`` is negative or NaN.
            SMPError: other ranks of the replica have called something else.
        """
        require_norm(max_norm)  # before anything is sent, and before gradients reach the masters
        if is_tracing():
            return 0.0
        with beside_the_program() as aside:
            if not aside:
                meet_for("optimizer.clip_master_grads()")
            norm: float = super().clip_master_grads(max_norm)  # type: ignore[misc]
        return norm


def DistributedOptimizer(  # a function, named like the class in the interface
    optimizer: torch.optim.Optimizer,
    static_loss_scale: float | None = 1.0,
    dynamic_loss_scale: bool = False,
    **dynamic_loss_args: Any,
) -> Any:
    """Make ``optimizer`` aware of partitions and return it, before or after ``smp.DistributedModel``.

    Args:
        optimizer: any torch optimizer over parameters of the model.
        static_loss_scale: the factor for losses; None is 1. This and all that follow are for the setting fp16
            only.
        dynamic_loss_scale: start at ``init_scale`` instead, skip steps whose gradients overflow, and adapt
            the scale.
        dynamic_loss_args: ``init_scale`` (2**32), ``scale_factor`` (2), ``scale_window`` (1000),
            ``min_scale`` (1), ``delayed_shift`` (1) and ``consecutive_hysteresis`` (False), as keywords or in
            the dict ``dynamic_loss_args``.

    Raises:
        TypeError: not a torch optimizer, or a keyword that no version has had.
        ValueError: an optimizer that needs all gradients in one process (LBFGS) or whole parameters with
            tensor parallelism (LAMB, NovoGrad), one whose ``step`` the script has replaced, or an impossible
            loss scale.
    """
    state.require("smp.DistributedOptimizer")
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(f"smp.DistributedOptimizer: expected a torch.optim.Optimizer, got {optimizer!r:.80}")
    arguments = dynamic_arguments(dynamic_loss_args)
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ValueError(
            "smp.DistributedOptimizer: LBFGS works on all parameters as one vector, but each rank has only "
            "its own; use an optimizer that treats parameters one by one, such as Adam or SGD"
        )
    if not isinstance(optimizer, _Methods):
        require_slices_suffice(optimizer)
        methods: tuple[type, ...] = (_Methods,)
        if state.cfg.half_dtype is not None:
            is_fp16 = state.cfg.fp16
            optimizer._smp_scale = shared_loss_scale(  # type: ignore[attr-defined]
                static_loss_scale if is_fp16 else 1.0, dynamic_loss_scale and is_fp16, arguments
            )
            methods = (HalfMethods, _Methods)
        if state.cfg.shards_parameters or state.cfg.shard_optimizer_state:
            require_elementwise(optimizer)
            sharded = ShardedParameterMethods if state.cfg.shards_parameters else ShardedMethods
            methods = (*methods[:-1], sharded, _Methods)
        override(optimizer, (_InStep, *methods))
        follow_class(optimizer)
    state.optimizers.pop(id(optimizer), None)
    state.optimizers[id(optimizer)] = optimizer
    if state.model is not None and state.model.partitioned:
        state.cut_optimizers(state.model)
    return optimizer
