"""Which parts of a split model live on this rank, as ``smp.DistributedModel`` reports it.

Parameters keep their objects and names when the model is partitioned; those of other ranks merely lose their
data.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from opensmd.modelparallel.compatibility.module_view import is_view_of, view_of, viewed
from opensmd.modelparallel.compatibility.quirks import name_original_forwards
from opensmd.modelparallel.delayed.delayed_parameter import DelayedParameters
from opensmd.modelparallel.exceptions import SMPError
from opensmd.modelparallel.planning.plan import Plan, ancestors
from opensmd.modelparallel.ranks.grid import CommGroup
from opensmd.modelparallel.ranks.sendable import sendable
from opensmd.modelparallel.state import state
from opensmd.modelparallel.state_dicts.save_pretrained import guard_save_pretrained

__all__ = ["Whereabouts"]


class Whereabouts(nn.Module):
    """A module that knows which of its parts live on this rank.

    Args:
        module: the user's module.

    Attributes:
        plan: where everything lives; None before the first step.
        gathered: whether ``cpu()`` has put the whole model on every rank.
        delayed: the parameters that get their values only when there is a plan.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self._modules["module"] = module = viewed(module)
        name_original_forwards(module)
        guard_save_pretrained(module)
        self._view: Any = None
        self._levels = 1  # views between this and the user's module
        self.plan: Plan | None = None
        self.gathered = False
        self.delayed = DelayedParameters(module)
        self._everywhere: dict[str, weakref.ref[Tensor]] = {}  # and the buffer of that name at first

    def __getattr__(self, name: str) -> Any:
        """Look up as in torch; if the user's module has the attribute, the error says where to find it.

        Raises:
            AttributeError: there is no such attribute.
        """
        try:
            return super().__getattr__(name)
        except AttributeError as error:
            module = self.__dict__.get("_modules", {}).get("module")
            if module is None or not hasattr(module, name):
                raise
            raise AttributeError(
                f"DistributedModel has no attribute {name!r}, but the {type(module).__name__} in it has: use "
                f"model.module.{name}"
            ) from error

    @property
    def partitioned(self) -> bool:
        """Whether the first step has placed the model's parts."""
        return self.plan is not None

    @property
    def module(self) -> Any:
        """The user's module, or a view of it (``module_view``) if it has no attribute ``module``."""
        module = self.get_module()
        if hasattr(module, "module"):
            return module
        if not is_view_of(self._view, module):
            self.__dict__["_view"] = view_of(module, self._levels)
        return self._view

    def get_module(self) -> nn.Module:
        """Return the user's module."""
        return self._modules["module"]  # type: ignore[return-value]

    def is_local(self, name: str) -> bool:
        """Whether the parameter, buffer or module of this full name has its data on this rank."""
        if self.plan is None:
            return True
        homes = self.plan.homes
        found = next(ancestor for ancestor in (name, *ancestors(name)) if ancestor in homes)
        return homes[found] == state.groups.rank_in(CommGroup.PP_GROUP)

    def is_here(self, name: str) -> bool:
        """Like :meth:`is_local`, and True for buffers of split modules, which every rank has a copy of."""
        return name in self._everywhere or self.is_local(name)

    def local_named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """The parameters of this rank with their full names; may be empty."""
        self._require_partitioned("local_named_parameters")
        return (
            (name, parameter)
            for name, parameter in self.get_module().named_parameters()
            if self.is_local(name)
        )

    def local_parameters(self) -> Iterator[nn.Parameter]:
        """The parameters of this rank; may be empty."""
        return (parameter for _, parameter in self.local_named_parameters())

    def local_named_buffers(self) -> Iterator[tuple[str, Tensor]]:
        """The buffers of this rank with their full names."""
        self._require_partitioned("local_named_buffers")
        return ((name, buffer) for name, buffer in self.get_module().named_buffers() if self.is_local(name))

    def local_buffers(self) -> Iterator[Tensor]:
        """The buffers of this rank."""
        return (buffer for _, buffer in self.local_named_buffers())

    def local_named_modules(self) -> Iterator[tuple[str, nn.Module]]:
        """The modules of this rank with their full names."""
        self._require_partitioned("local_named_modules")
        return ((name, module) for name, module in self.get_module().named_modules() if self.is_local(name))

    def local_modules(self) -> Iterator[nn.Module]:
        """The modules of this rank."""
        return (module for _, module in self.local_named_modules())

    def _home_of(self, name: str) -> int:
        """Return the rank in the replica that holds an entry of the state dict."""
        assert self.plan is not None
        homes = self.plan.homes
        return homes[next(ancestor for ancestor in (name, *ancestors(name)) if ancestor in homes)]

    def _share_what_is_everywhere(self) -> None:
        """Make all copies of a buffer equal to that of its home.

        They may have been drawn at random, or only the home may have loaded them. All ranks must call.
        """
        group = state.groups[CommGroup.PP_GROUP]
        for name, buffer in self.get_module().named_buffers():
            if name in self._everywhere:
                data = sendable(buffer)
                dist.broadcast(data, group=group, group_src=self._home_of(name))
                buffer.detach().copy_(data)

    def _require_partitioned(self, name: str) -> None:
        if not self.partitioned:
            raise SMPError(
                f"{name}() works once the model is partitioned, which the first call of a smp.step function "
                "does; use register_post_partition_hook to act right then"
            )
