"""Which parameters the tensor-parallel ranks share, and conversion between slices and whole values."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from opensmd.modelparallel.ranks.gathered import newly_gathered
from opensmd.modelparallel.ranks.sendable import sendable
from opensmd.modelparallel.ranks.shards import Shard, shards_of
from opensmd.modelparallel.ranks.slices import Rows
from opensmd.modelparallel.state import state
from opensmd.modelparallel.state_dicts.missing_tensors import has_data
from opensmd.modelparallel.state_dicts.whereabouts import Whereabouts
from opensmd.modelparallel.tensor_parallel.collectives import all_gathered
from opensmd.modelparallel.tensor_parallel.distributed_module import DistributedModule, outermost
from opensmd.modelparallel.tensor_parallel.tensor_group import (
    tensor_process_group,
    tensor_rank,
    tensor_size,
)

__all__ = ["DistributedParts", "cut_entry", "slices_in", "whole_entries"]


class DistributedParts(Whereabouts):
    """A module that knows which of its parts are split over the tensor-parallel group.

    Args:
        module: the user's module, with its distributed modules in place.

    Attributes:
        shards: how parameters and buffers are split, by name; empty if the group has one rank.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module)
        module = self.get_module()
        shared = state.cfg.tensor_parallel_degree > 1
        self.shards = shards_of(module) if shared else {}
        self._scaled = set(_scaled_names(module)) if shared else set()
        self._split = {*self.shards, *_sharded_by_torch(module)} if shared else set()

    def distributed_modules(self) -> Iterator[nn.Module]:
        """The modules that the tensor-parallel ranks compute together."""
        return (module for module in self.get_module().modules() if isinstance(module, DistributedModule))

    def is_distributed_parameter(self, parameter: nn.Parameter) -> bool:
        """Whether each tensor-parallel rank has a slice of it."""
        return any(tensor is parameter for name, tensor in self._named_tensors() if name in self._split)

    def is_distributed_buffer(self, buffer: Tensor) -> bool:
        """Whether each tensor-parallel rank has a slice of it."""
        return any(tensor is buffer for name, tensor in self._named_tensors() if name in self._split)

    def is_scaled_batch_parameter(self, parameter: nn.Parameter) -> bool:
        """Whether it works on the whole tensor-parallel group's batch, as distributed modules do."""
        return any(tensor is parameter for name, tensor in self._named_tensors() if name in self._scaled)

    def is_scaled_batch_buffer(self, buffer: Tensor) -> bool:
        """Whether it works on the whole tensor-parallel group's batch, as distributed modules do."""
        return any(tensor is buffer for name, tensor in self._named_tensors() if name in self._scaled)

    def default_reducer_named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """This rank's parameters whose gradients are reduced over the data-parallel group."""
        return (
            (name, parameter) for name, parameter in self.local_named_parameters() if name not in self._scaled
        )

    def scaled_batch_reducer_named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """This rank's parameters whose gradients are reduced over the reduced-data-parallel group."""
        return (
            (name, parameter) for name, parameter in self.local_named_parameters() if name in self._scaled
        )

    def sliced_parameters(self) -> Iterator[nn.Parameter]:
        """The parameters of which this rank has a slice."""
        return (parameter for name, parameter in self.get_module().named_parameters() if name in self.shards)

    def counts_here(self, name: str) -> bool:
        """Whether this rank contributes a parameter to sums over the replica, as all ranks do with slices."""
        return tensor_size() == 1 or tensor_rank() == 0 or name in self._split

    @property
    def has_scaled_batch(self) -> bool:
        """Whether any parameter or buffer works on the whole tensor-parallel group's batch."""
        return bool(self._scaled)

    def is_common_part(self, name: str) -> bool:
        """Whether all tensor-parallel ranks have the same values of this tensor of a distributed module."""
        return name in self._scaled and name not in self._split

    def works_on_scaled_batch(self, name: str) -> bool:
        """Like :meth:`is_scaled_batch_parameter`, by name."""
        return name in self._scaled

    def _named_tensors(self) -> Iterator[tuple[str, Tensor]]:
        module = self.get_module()
        yield from module.named_parameters(remove_duplicate=False)
        yield from module.named_buffers(remove_duplicate=False)

    def _make_common_parts_equal(self) -> None:
        """Copy the common parts of distributed modules from the first tensor-parallel rank."""
        for name, tensor in self._named_tensors():
            common = self.is_common_part(name) and not isinstance(tensor, DTensor)
            if common and self.is_here(name) and has_data(tensor):
                data = sendable(tensor.detach())
                dist.broadcast(data, group=tensor_process_group(), group_src=0)
                tensor.detach().copy_(data)


def whole_entries(entries: Mapping[Any, Any], shards: Mapping[Any, Shard]) -> dict[Any, Any]:
    """Merge slices among the entries into whole tensors; all tensor-parallel ranks must call alike."""
    gathered: dict[tuple[Any, ...], Tensor] = {}
    whole: dict[Any, Any] = {}
    for name, value in entries.items():
        whole[name] = value
        if isinstance(value, DTensor) and value.device_mesh == state.sharding_mesh:
            key: tuple[Any, ...] = (value.to_local().untyped_storage().data_ptr(), value.shape)
            if key not in gathered:
                gathered[key] = _all_columns(_all_rows(value), shards.get(name))
            whole[name] = gathered[key]
        elif isinstance(value, DTensor):
            if not value.to_local().is_meta:
                whole[name] = value.full_tensor().detach()
        elif name in shards and isinstance(value, Tensor) and has_data(value):
            key = (value.data_ptr(), value.shape, value.stride())  # tied entries stay tied
            if key not in gathered:
                gathered[key] = _all_columns(value.detach(), shards[name])
            whole[name] = gathered[key]
    return whole


def _all_columns(value: Tensor, shard: Shard | None) -> Tensor:
    """Gather the slices of all tensor-parallel ranks, if the tensor is split over them."""
    if shard is None:
        return value
    if value.is_meta:  # not wanted here, nor on the other tensor-parallel ranks
        return value.new_empty(shard.whole_shape(value.shape))
    return newly_gathered(all_gathered(value, shard.axis, shard.size))


def _all_rows(value: DTensor) -> Tensor:
    group = state.groups.shards
    return Rows(group.size(), group.rank()).whole(value.to_local(), value.shape, group)


def slices_in(entries: Mapping[Any, Any], shards: Mapping[Any, Shard]) -> list[list[Any]]:
    """Return a file's description of its slices: name, axis, and whole size along it."""
    return [
        [name, shards[name].axis, shards[name].size]
        for name, value in entries.items()
        if name in shards and isinstance(value, Tensor)
    ]


def cut_entry(value: Any, shard: Shard | None, own: Any) -> Any:
    """Return what a rank loads from an entry: its slice of a whole tensor, otherwise the entry itself.

    Args:
        value: what was saved.
        shard: how the tensor is split here, if it is.
        own: this rank's tensor.
    """
    if not isinstance(value, Tensor) or isinstance(value, DTensor) or not isinstance(own, Tensor):
        return value
    if shard is not None and value.shape != own.shape and value.shape == shard.whole_shape(own.shape):
        value = shard.cut(value, tensor_size(), tensor_rank())
    if isinstance(own, DTensor):
        return distribute_tensor(value.to(own.device), own.device_mesh, own.placements, src_data_rank=None)
    return value


def _scaled_names(module: nn.Module) -> Iterator[str]:
    """Yield names of tensors that belong to distributed modules or are split by torch's own parallelism."""
    for prefix, distributed in outermost(module):
        for name, _ in [
            *distributed.named_parameters(remove_duplicate=False),
            *distributed.named_buffers(remove_duplicate=False),
        ]:
            yield f"{prefix}.{name}" if prefix else name
    for name, parameter in module.named_parameters(remove_duplicate=False):
        if isinstance(parameter, DTensor):
            yield name


def _sharded_by_torch(module: nn.Module) -> Iterator[str]:
    for name, parameter in module.named_parameters(remove_duplicate=False):
        if isinstance(parameter, DTensor) and any(placement.is_shard() for placement in parameter.placements):
            yield name
