"""What ``smp.DistributedOptimizer`` does if replicas split its state.

Once the parameters are placed, the groups contain a slice of each parameter, in the parameter's own memory.
The optimizer keeps state only for the slices::

    smp.step         gradients, averaged over the replicas
    optimizer.step   trains this rank's slices; then replicas exchange theirs, unless the
                     parameters themselves are sharded
    state_dict       whole again, from the slices of all
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from opensmd.modelparallel.exceptions import SMPCheckpointError, SMPError
from opensmd.modelparallel.precision.layout import Layout
from opensmd.modelparallel.precision.optimizer_attributes import PrecisionAttributes
from opensmd.modelparallel.ranks.slices import Rows, Slicing, gather_parameters
from opensmd.modelparallel.sharding._torch_internals import local_part
from opensmd.modelparallel.sharding.former_layout import make_contiguous
from opensmd.modelparallel.sharding.trained_slices import (
    OfShardedParameter,
    OfWholeParameter,
    TrainedSlice,
    is_cut,
)
from opensmd.modelparallel.state import state
from opensmd.modelparallel.state_dicts.laid_out import laid_out_as
from opensmd.modelparallel.wrapped import WrappedModel
from opensmd.optim.param_groups import params_of

__all__ = ["SHARD", "ShardedMethods", "require_elementwise"]

SHARD = "_smp_shard"  # in a state dict of slices: the number of this part, and of parts

# State per parameter; all other state is per element, even for 0-dimensional parameters.
_OF_WHOLE_PARAMETER = frozenset({"step", "mu_product", "eta", "mu"})

# These treat every element separately, so a slice is trained as in the whole parameter.
_ELEMENTWISE = (
    "SGD",
    "Adam",
    "AdamW",
    "NAdam",
    "RAdam",
    "Adamax",
    "Adagrad",
    "Adadelta",
    "RMSprop",
    "ASGD",
    "Rprop",
    "FusedAdam",
)


def require_elementwise(optimizer: torch.optim.Optimizer) -> None:
    """Refuse an optimizer that may treat parameters as a whole.

    Raises:
        ValueError: it is not known to be elementwise.
    """
    kind = type(optimizer)
    known = kind.__module__.startswith(("torch.optim.", "opensmd.optim.")) and kind.__name__ in _ELEMENTWISE
    if not known:
        key, nothing = setting()
        raise ValueError(
            f"{key}: {kind.__name__} may need whole parameters (their norms, rows or "
            "columns), but each rank would train a slice of each. Use one of "
            f"{', '.join(_ELEMENTWISE)}, or set {key} to {nothing}"
        )


def setting() -> tuple[str, str]:
    """Return the setting that splits the optimizer's state, and the value that turns it off."""
    if state.cfg.shards_parameters:
        return "sharded_data_parallel_degree", "1"
    return "shard_optimizer_state", "False"


class _Slices(dict[int, TrainedSlice]):
    """This rank's slices, by the numbers of their parameters.

    Args:
        numbers: of parameters in the whole optimizer, by id; slices are added with their parameters' numbers.
    """

    def __init__(self, numbers: dict[int, int]) -> None:
        super().__init__()
        self.numbers = numbers

    def add(self, trained: TrainedSlice) -> None:
        """Note a slice that replaces its parameter."""
        self[trained.number] = trained
        self.numbers[id(trained.own)] = trained.number


class ShardedMethods(PrecisionAttributes):
    """A mixin that precedes a distributed optimizer's own class."""

    state: Any
    _smp_slices: _Slices | None = None
    _smp_gathers = True  # False while only this rank's slices are requested

    @property
    def master_params(self) -> list[nn.Parameter]:
        """The tensors whose gradients are clipped: masters, slices, or whole parameters of this rank."""
        if self._smp_slices is None or state.cfg.half_dtype is not None or state.cfg.shards_parameters:
            return super().master_params
        return [trained.parameter for trained in self._smp_slices.values()]

    def step(self, closure: None = None) -> float | None:
        """Train this rank's slices and complete the parameters; all replicas must call.

        Raises:
            SMPError: before the first step, or inside one with several microbatches.
            ValueError: a closure, or sparse gradients.
        """
        if closure is not None:
            raise ValueError(f"optimizer.step takes no closure with {setting()[0]}")
        if state.model is not None:
            state.model.require_whole_batch("optimizer.step")
        if self._smp_layout is None:
            raise SMPError(
                "optimizer.step was called before the first smp.step function, which makes gradients and, "
                f"with {setting()[0]}, shares out the optimizer's state"
            )
        if state.cfg.half_dtype is not None:  # the methods for half precision do the rest
            return super().step()  # type: ignore[misc, no-any-return]
        self._smp_collect_gradients()
        self._smp_before_training()
        result: float | None = super().step()  # type: ignore[misc]
        self._smp_complete_model()
        return result

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Zero the whole gradients, as in torch."""
        super().zero_grad(set_to_none)  # type: ignore[misc]
        whole = [trained.parameter for trained in (self._smp_slices or {}).values()]
        self._smp_zero(whole, set_to_none=set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group; after the first step its parameters are sliced."""
        super().add_param_group(param_group)  # type: ignore[misc]
        if self._smp_slices is not None:
            self._smp_slice(self.param_groups[-1], self._smp_slices)

    def local_state_dict(self, *, gather_if_shard: bool = True) -> dict[str, Any]:
        """Return this rank's state as without sharding; all replicas must call, to exchange slices.

        Args:
            gather_if_shard: False returns only this rank's slices, without communication; they load at the
                same degree.

        Raises:
            SMPError: the model has not been partitioned yet.
        """
        if gather_if_shard or self._smp_slices is None:
            whole: dict[str, Any] = super().local_state_dict()  # type: ignore[misc]
            return whole
        self._smp_gathers = False
        try:
            own: dict[str, Any] = super().local_state_dict()  # type: ignore[misc]
        finally:
            self._smp_gathers = True
        return {**own, SHARD: (self._smp_group.rank(), self._smp_group.size())}

    def _smp_fitting(self, state_dict: Mapping[str, Any]) -> dict[str, Any]:
        """Return it as without sharding, also for slices from ``local_state_dict(gather_if_shard=False)``.

        Raises:
            SMPCheckpointError: the slices are from another rank or degree.
        """
        saved = state_dict
        if isinstance(saved, Mapping) and SHARD in saved:
            saved = self._smp_from_slices(saved)
        fitting: dict[str, Any] = super()._smp_fitting(saved)  # type: ignore[misc]
        return fitting

    def _smp_from_slices(self, saved: Mapping[str, Any]) -> dict[str, Any]:
        if self._smp_slices is None:
            raise SMPError(
                "optimizer.load_state_dict: slices of sharded optimizer state can be loaded once there are "
                "parameters to load them for: after the first step, for example in "
                "model.register_post_step_hook"
            )
        rank, ranks = saved[SHARD]
        mine = self._smp_group.rank(), self._smp_group.size()
        if (rank, ranks) != mine:
            raise SMPCheckpointError(
                f"these slices of sharded optimizer state are part {rank} of {ranks}, and this rank's are "
                f"part {mine[0]} of {mine[1]}; load what local_state_dict() or state_dict() gave, which is "
                "whole"
            )
        whole = {name: value for name, value in saved.items() if name != SHARD}
        return {**whole, "state": self._smp_gathered(saved["state"])}

    def _smp_gathered(self, entries: Mapping[Any, Any]) -> dict[Any, Any]:
        """Gather slices into whole tensors; all replicas must call."""
        gathered = dict(entries)
        for number, trained in sorted((self._smp_slices or {}).items()):
            if number in gathered:
                gathered[number] = {
                    key: trained.whole(value) if _like(value, trained.own.shape) else value
                    for key, value in gathered[number].items()
                }
        return gathered

    @property
    def _smp_group(self) -> dist.ProcessGroup:
        return state.groups.shards

    @property
    def _smp_norm_group(self) -> dist.ProcessGroup | None:
        """The ranks with other slices of the gradients to be clipped."""
        whole = state.cfg.half_dtype is None and not state.cfg.shards_parameters
        return None if whole or self._smp_slices is None else self._smp_group

    def _smp_counts_here(self, parameter: nn.Parameter) -> bool:
        counts: bool = super()._smp_counts_here(parameter)
        slices = self._smp_slices
        if slices is None or self._smp_norm_group is None or not counts:
            return counts
        return slices.numbers[id(parameter)] in slices or self._smp_group.rank() == 0

    def _smp_collect_gradients(self) -> None:
        for trained in (self._smp_slices or {}).values():
            trained.follow()

    def _smp_complete_model(self) -> None:
        slices = (self._smp_slices or {}).values()
        for trained in slices:
            trained.forget_gradient()
        whole = [trained.parameter for trained in slices if isinstance(trained, OfWholeParameter)]
        if whole:
            gather_parameters(whole, self._smp_slicing, self._smp_group)

    def _smp_model_parameter(self, trained: nn.Parameter) -> nn.Parameter:
        slices = (self._smp_slices or {}).values()
        return next((piece.parameter for piece in slices if piece.own is trained), trained)

    @property
    def _smp_slicing(self) -> Slicing:
        return Slicing(self._smp_group.size(), self._smp_group.rank())

    def _smp_after_partition(self, model: WrappedModel) -> None:
        super()._smp_after_partition(model)
        if self._smp_slices is None and self._smp_layout is not None and self._smp_slicing.ranks > 1:
            self._smp_slices = slices = _Slices(self._smp_layout.local)
            for group in self.param_groups:
                self._smp_slice(group, slices)

    def _smp_slice(self, group: dict[str, Any], slices: _Slices) -> None:
        """Replace a group's parameters, and any existing state, by slices."""
        for position, parameter in enumerate(group["params"]):
            if state.cfg.shards_parameters and not is_cut(parameter):
                continue
            trained = self._smp_slice_of(parameter, slices.numbers[id(parameter)])
            group["params"][position] = trained.own
            slices.add(trained)
            if parameter in self.state:
                self.state[trained.own] = _cut(self.state.pop(parameter), trained)

    def _smp_slice_of(self, parameter: nn.Parameter, number: int) -> TrainedSlice:
        trained: TrainedSlice
        placeholder = nn.Parameter(torch.empty(0), requires_grad=False)
        if is_cut(parameter):
            rows = Rows(self._smp_group.size(), self._smp_group.rank())
            trained = OfShardedParameter(parameter, placeholder, number, rows, self._smp_group)
        else:
            make_contiguous(parameter)
            trained = OfWholeParameter(parameter, placeholder, number, self._smp_slicing, self._smp_group)
        trained.own = nn.Parameter(trained.memory(), parameter.requires_grad)
        trained.own.ds_tensor = getattr(parameter, "ds_tensor", None)  # type: ignore[attr-defined]
        return trained

    def _smp_slice_at(self, number: int) -> TrainedSlice | None:
        return None if self._smp_slices is None else self._smp_slices.get(number)

    def _smp_own_part(self, number: int, whole: Tensor) -> Tensor:
        trained = self._smp_slice_at(number)
        return whole if trained is None else trained.cut(whole).clone()

    def _smp_whole(self, number: int, part: Tensor) -> Tensor:
        trained = self._smp_slice_at(number)
        return trained.whole(part) if trained is not None and self._smp_gathers else part

    def _smp_localised(self, saved: dict[str, Any], layout: Layout) -> dict[str, Any]:
        own: dict[str, Any] = super()._smp_localised(saved, layout)  # type: ignore[misc]
        parameters = params_of(self.param_groups)
        for position, parameter in enumerate(parameters):
            trained = self._smp_slice_at(layout.local[id(parameter)])
            if trained is not None and position in own["state"]:
                own["state"][position] = _cut(own["state"][position], trained)
        return own

    def _smp_renumbered(self, layout: Layout) -> dict[str, Any]:
        """Return the state dict with whole tensors; all replicas must call."""
        own: dict[str, Any] = super()._smp_renumbered(layout)  # type: ignore[misc]
        if self._smp_gathers:
            own["state"] = self._smp_gathered(own["state"])
        return own


def _cut(entries: Mapping[str, Any], trained: TrainedSlice) -> dict[str, Any]:
    shape = trained.parameter.shape
    return {
        key: _slice(value, trained) if key not in _OF_WHOLE_PARAMETER and _like(value, shape) else value
        for key, value in entries.items()
    }


def _slice(whole: Tensor, trained: TrainedSlice) -> Tensor:
    """Slice a tensor shaped like the parameter; state of sharded parameters is already sharded."""
    return laid_out_as(trained.own, local_part(whole) if isinstance(whole, DTensor) else trained.cut(whole))


def _like(value: Any, shape: torch.Size) -> bool:
    return isinstance(value, Tensor) and value.shape == shape
