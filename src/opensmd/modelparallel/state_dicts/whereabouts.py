"""Which parts of a split model live on this rank, as ``smp.DistributedModel`` reports it.

Parameters keep their objects and names when the model is partitioned; those of other ranks merely lose their
data.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from opensmd.modelparallel.compatibility.module_view import is_view_of, view_of, viewed
from opensmd.modelparallel.compatibility.quirks import name_original_forwards
from opensmd.modelparallel.delayed.delayed_parameter import DelayedParameters
from opensmd.modelparallel.exceptions import SMPError
from opensmd.modelparallel.planning.plan import Plan, nearest
from opensmd.modelparallel.ranks.grid import CommGroup
from opensmd.modelparallel.ranks.sendable import sendable
from opensmd.modelparallel.runtime.tensors.placeholder import Placeholder
from opensmd.modelparallel.runtime.tensors.tags import tag_of
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
        self._split_modules: frozenset[str] = frozenset()

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
        return self.plan is None or self.home_of(name) == state.groups.rank_in(CommGroup.PP_GROUP)

    def is_here(self, name: str) -> bool:
        """Like :meth:`is_local`, and True for buffers of split modules, which every rank has a copy of.

        It is a placeholder if a forward has replaced the buffer by what another rank has computed.
        """
        return self._is_of_split(name) or self.is_local(name)

    def _is_of_split(self, name: str) -> bool:
        """Whether this is the name of a buffer of a split module."""
        owner, _, own = name.rpartition(".")
        if owner not in self._split_modules:
            return False
        return self.get_module().get_submodule(owner)._buffers.get(own) is not None

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
        me = state.groups.rank_in(CommGroup.PP_GROUP)
        return (
            (name, buffer)
            for name, buffer in self.get_module().named_buffers()
            if self._home_of_buffer(name, buffer) == me
        )

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

    def home_of(self, name: str) -> int:
        """Return the rank in the replica that holds an entry of the state dict."""
        assert self.plan is not None
        holder = nearest(name, self.plan.homes)
        assert holder is not None  # every plan has a home for the root
        return self.plan.homes[holder]

    def _home_of_buffer(self, name: str, buffer: Tensor) -> int:
        """Return the rank in the replica that holds a buffer, or counts as doing so if all do."""
        tag = tag_of(buffer) if self._is_of_split(name) else None
        return self.home_of(name) if tag is None else tag.home

    def share_what_is_everywhere(self, sources: Mapping[str, int] = MappingProxyType({})) -> None:
        """Make all copies of a buffer equal to that of its home; all ranks must call.

        They may have been drawn at random, only the home may have loaded them, or a forward may have replaced
        them by what the home alone has computed.

        Args:
            sources: the ranks whose copies count instead, by name.
        """
        group = state.groups[CommGroup.PP_GROUP]
        shared: dict[Tensor, Tensor] = {}  # by the buffers themselves, which must not be freed meanwhile
        for name, buffer in self.get_module().named_buffers(remove_duplicate=False):
            if not self._is_of_split(name):
                continue
            if buffer not in shared:
                shared[buffer] = whole = _whole(buffer)
                data = sendable(whole)
                source = sources.get(name, self._home_of_buffer(name, buffer))
                dist.broadcast(data, group=group, group_src=source)
                whole.detach().copy_(data)
            owner, _, own = name.rpartition(".")
            self.get_module().get_submodule(owner)._buffers[own] = shared[buffer]

    def _require_partitioned(self, name: str) -> None:
        if not self.partitioned:
            raise SMPError(
                f"{name}() works once the model is partitioned, which the first call of a smp.step function "
                "does; use register_post_partition_hook to act right then"
            )


def _whole(buffer: Tensor) -> Tensor:
    """Return a buffer, or if it has been computed on one rank, a tensor that may be on all."""
    if isinstance(buffer, Placeholder):
        return torch.empty_strided(buffer.shape, buffer.stride(), dtype=buffer.dtype, device=buffer.device)
    return buffer if tag_of(buffer) is None else buffer.detach().clone()
