"""What ``smp.DistributedOptimizer`` does with the setting ``shard_optimizer_state``.

From the first step on, which places the parameters, the groups have a slice of each parameter, in the
parameter's own memory. The optimizer keeps state for the slices alone::

    smp.step         gradients, averaged over the replicas
    optimizer.step   trains this rank's slices; then the replicas send each other theirs
    state_dict       whole again, from the slices of all
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from opensmd.modelparallel.exceptions import SMPError
from opensmd.modelparallel.precision.optimizer_attributes import PrecisionAttributes
from opensmd.modelparallel.ranks.grid import CommGroup
from opensmd.modelparallel.sharding.slices import Slicing, gather_parameters, gathered
from opensmd.modelparallel.state import state

__all__ = ["ShardedMethods", "require_elementwise"]

# They treat every element of a parameter by itself, so that a slice is trained as in the whole.
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
    """Refuse an optimizer that may look at parameters as a whole.

    Raises:
        ValueError: it is none of those that are known not to.
    """
    kind = type(optimizer)
    known = kind.__module__.startswith(("torch.optim.", "opensmd.optim.")) and kind.__name__ in _ELEMENTWISE
    if not known:
        raise ValueError(
            f"shard_optimizer_state: {kind.__name__} may need whole parameters (their norms, rows or "
            "columns), but each rank would train a slice of each. Use one of "
            f"{', '.join(_ELEMENTWISE)}, or set shard_optimizer_state to False"
        )


class ShardedMethods(PrecisionAttributes):
    """Mixed in front of a distributed optimizer's own class."""

    state: Any
    _smp_slices: list[tuple[nn.Parameter, nn.Parameter]] | None = None  # parameters and their slices

    @property
    def master_params(self) -> list[nn.Parameter]:
        """This rank's parameters, whole, as their gradients are."""
        if self._smp_slices is None:
            return super().master_params
        return [parameter for parameter, _ in self._smp_slices]

    def step(self, closure: None = None) -> Any:
        """Train this rank's slices, and complete the parameters; called on all replicas.

        Raises:
            SMPError: before the first step, or inside one with several microbatches.
            ValueError: a closure, or sparse gradients.
        """
        if closure is not None:
            raise ValueError("optimizer.step takes no closure with shard_optimizer_state")
        if state.model is not None:
            state.model.require_whole_batch("optimizer.step")
        if self._smp_layout is None:  # type: ignore[attr-defined]
            raise SMPError(
                "optimizer.step was called before the first smp.step function, which makes gradients and, "
                "with shard_optimizer_state, shares out the optimizer's state"
            )
        if self._smp_slices is None:  # there is one replica
            return super().step()  # type: ignore[misc]
        for parameter, own in self._smp_slices:
            own.data = self._smp_slicing.cut(parameter.data)
            own.grad = self._smp_gradient(parameter)
        result = super().step()  # type: ignore[misc]
        for _, own in self._smp_slices:
            own.grad = None
        gather_parameters(self.master_params, self._smp_slicing, self._smp_group)
        return result

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As torch's, for the whole gradients."""
        super().zero_grad(set_to_none)  # type: ignore[misc]
        for parameter, _ in self._smp_slices or ():
            if set_to_none or parameter.grad is None:
                parameter.grad = None
            else:
                parameter.grad.detach_().zero_()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group; after the first step its parameters are sliced."""
        super().add_param_group(param_group)  # type: ignore[misc]
        if self._smp_slices is not None:
            self._smp_slice(self.param_groups[-1])

    def local_state_dict(self, *, gather_if_shard: bool = True) -> dict[str, Any]:
        """As without sharding; with ``gather_if_shard=False`` refused, as slices fit no other degree.

        Raises:
            SMPError: the model has not been partitioned yet, or ``gather_if_shard`` is False.
        """
        if not gather_if_shard:
            raise SMPError(
                "local_state_dict(gather_if_shard=False): slices of sharded optimizer state are not saved by "
                "themselves here; leave the argument out, on all ranks"
            )
        local: dict[str, Any] = super().local_state_dict()  # type: ignore[misc]
        return local

    @property
    def _smp_group(self) -> dist.ProcessGroup:
        return state.groups[CommGroup.RDP_GROUP]

    @property
    def _smp_slicing(self) -> Slicing:
        return Slicing(self._smp_group.size(), self._smp_group.rank())

    def _smp_gradient(self, parameter: nn.Parameter) -> Tensor | None:
        if parameter.grad is None:
            return None
        if parameter.grad.layout is not torch.strided:
            raise ValueError(
                "shard_optimizer_state: a parameter has sparse gradients, of which slices cannot be cut; use "
                "sparse=False"
            )
        return self._smp_slicing.cut(parameter.grad)

    def _smp_after_partition(self) -> None:
        super()._smp_after_partition()
        if self._smp_slices is None and self._smp_slicing.ranks > 1:
            self._smp_slices = []
            for group in self.param_groups:
                self._smp_slice(group)

    def _smp_slice(self, group: dict[str, Any]) -> None:
        """Put slices in the place of a group's parameters, and of what state there is."""
        assert self._smp_slices is not None
        local = self._smp_layout.local  # type: ignore[attr-defined]
        for position, parameter in enumerate(group["params"]):
            parameter.data = parameter.data.contiguous()
            own = nn.Parameter(self._smp_slicing.cut(parameter.data), parameter.requires_grad)
            group["params"][position] = own
            local[id(own)] = local[id(parameter)]
            self._smp_slices.append((parameter, own))
            if parameter in self.state:
                self.state[own] = self._smp_cut(self.state.pop(parameter), parameter.shape)

    def _smp_cut(self, entries: Mapping[str, Any], shape: torch.Size) -> dict[str, Any]:
        return {
            key: self._smp_slicing.cut(each).clone() if _like_parameter(each, shape) else each
            for key, each in entries.items()
        }

    def _localised(self, given: dict[str, Any]) -> dict[str, Any]:
        own: dict[str, Any] = super()._localised(given)  # type: ignore[misc]
        if self._smp_slices is not None:
            for number, (parameter, _) in enumerate(self._smp_slices):
                if number in own["state"]:
                    own["state"][number] = self._smp_cut(own["state"][number], parameter.shape)
        return own

    def _renumbered(self) -> dict[str, Any]:
        """With whole tensors; called on all replicas."""
        own: dict[str, Any] = super()._renumbered()  # type: ignore[misc]
        for parameter, mine in self._smp_slices or ():
            number = self._smp_layout.local[id(mine)]  # type: ignore[attr-defined]
            if number in own["state"]:
                own["state"][number] = {
                    key: gathered(each, parameter.shape, self._smp_slicing, self._smp_group)
                    if _like_parameter(each, mine.shape)
                    else each
                    for key, each in own["state"][number].items()
                }
        return own


def _like_parameter(value: Any, shape: torch.Size) -> bool:
    return isinstance(value, Tensor) and value.shape == shape and value.dim() > 0
