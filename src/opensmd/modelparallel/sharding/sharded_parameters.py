"""Parameters split over the ranks of a shard group: torch's FSDP2 on a stage's modules.

Each unit is filled, made equal on all replicas and cut before the next one, so that with delayed
initialization no rank ever needs memory for the whole model.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

from opensmd.modelparallel.sharding._torch_internals import has_hooks, local_part
from opensmd.modelparallel.sharding.former_layout import describe_as, make_contiguous
from opensmd.modelparallel.sharding.units import find_units, kept_units
from opensmd.modelparallel.tensor_parallel.layers.embedding import DistributedEmbedding

__all__ = ["Limits", "ShardedParameters", "made_equal", "shard_model", "shard_stage"]


@dataclass(frozen=True, kw_only=True)
class Limits:
    """The settings of sharding, in elements.

    Attributes:
        least: smaller blocks are gathered with the root (``sdp_param_persistence_threshold``).
        most: larger blocks are divided (``sdp_reduce_bucket_size``).
        live: the most that may stay gathered from forward to backward (``sdp_max_live_parameters``).
    """

    least: int
    most: int
    live: int


class ShardedParameters:
    """The sharded parts of a model.

    Attributes:
        units: the modules that are gathered one by one, inner ones first.
        stays_gathered: whether all of them stay gathered between a step's microbatches.
    """

    def __init__(self, mesh: DeviceMesh) -> None:
        self.mesh = mesh
        self.units: list[FSDPModule] = []
        self.stays_gathered = True
        self._now: dict[int, nn.Parameter] = {}
        self._before: list[nn.Parameter] = []  # kept alive, so that nothing else gets their ids

    def current(self, parameter: nn.Parameter) -> nn.Parameter:
        """Return what the model now has in place of a parameter from before it was sharded."""
        return self._now.get(id(parameter), parameter)

    def add(self, unit: nn.Module, left_out: Collection[nn.Parameter], *, keep: bool) -> None:
        """Shard ``unit``, except inner units and ``left_out``.

        Args:
            keep: whether it stays gathered after forward.
        """
        before = dict(unit.named_parameters())
        ignored = {parameter for parameter in left_out if not isinstance(parameter, DTensor)}
        fully_shard(unit, mesh=self.mesh, reshard_after_forward=not keep, ignored_params=ignored or None)
        for name, parameter in unit.named_parameters():
            old = before[name]
            if parameter is not old:
                self._now[id(old)] = parameter
                self._before.append(old)
                old.untyped_storage().resize_(0)
                describe_part(parameter)
                describe_as(parameter, old)
        assert isinstance(unit, FSDPModule)
        self.units.append(unit)
        self.stays_gathered = self.stays_gathered and keep


def shard_model(
    module: nn.Module, names: Collection[str], mesh: DeviceMesh, limits: Limits, prepare: Callable[..., None]
) -> ShardedParameters:
    """Shard a model that is whole on this rank; blocks are gathered when they are called.

    Args:
        names: the parameters to shard; others stay whole.
        prepare: fills parameters and makes them equal on all replicas.
    """
    chosen = _chosen(module, names)
    left_out = [parameter for parameter in module.parameters() if id(parameter) not in chosen]
    units = find_units(
        module, least=limits.least, most=limits.most, left_out={id(parameter) for parameter in left_out}
    )
    units = [unit for unit in units if unit is not module]
    own = _own_parameters([*units, module], chosen)
    elements = [sum(parameter.numel() for parameter in parameters) for parameters in own]
    keep = [*kept_units(elements[:-1], limits.live - elements[-1]), True]
    sharded = ShardedParameters(mesh)
    for unit, parameters, kept in zip([*units, module], own, keep, strict=True):
        prepare(parameters)
        sharded.add(unit, left_out, keep=kept)
    prepare(left_out)
    _describe_wholes(left_out)
    return sharded


def shard_stage(
    module: nn.Module, names: Collection[str], mesh: DeviceMesh, modules: Sequence[nn.Module]
) -> ShardedParameters:
    """Shard this rank's part of a split model; it is gathered for whole steps.

    Args:
        names: the parameters to shard; those of several modules stay whole.
        modules: those that run as a whole on this rank.
    """
    chosen = _chosen(module, names)
    owners = Counter(id(parameter) for unit in dict.fromkeys(modules) for parameter in unit.parameters())
    chosen = {parameter for parameter in chosen if owners[parameter] == 1}
    left_out = [parameter for parameter in module.parameters() if id(parameter) not in chosen]
    left = {id(parameter) for parameter in left_out}
    sharded = ShardedParameters(mesh)
    for unit in dict.fromkeys(modules):
        if any(id(parameter) in chosen for parameter in unit.parameters()):
            sharded.add(unit, left_out, keep=True)
    whole = [
        parameter
        for unit in dict.fromkeys(modules)
        for parameter in unit.parameters()
        if id(parameter) in left
    ]
    _describe_wholes(whole)
    return sharded


def describe_part(parameter: nn.Parameter) -> None:
    """Give a parameter the attributes that scripts read: ``ds_tensor``, ``ds_shape`` and ``ds_numel``."""
    assert isinstance(parameter, DTensor)
    _describe(parameter, local_part(parameter).detach())


def _describe_wholes(parameters: Sequence[nn.Parameter]) -> None:
    for parameter in parameters:
        _describe(parameter, parameter.detach())


def _describe(parameter: nn.Parameter, part: Tensor) -> None:
    flat: Tensor = part.reshape(-1)
    flat.ds_numel = flat.numel()  # type: ignore[attr-defined]
    parameter.ds_tensor = flat  # type: ignore[attr-defined]
    parameter.ds_shape = parameter.shape  # type: ignore[attr-defined]
    parameter.ds_numel = parameter.numel()  # type: ignore[attr-defined]


def _chosen(module: nn.Module, names: Collection[str]) -> set[int]:
    """Return the parameters that FSDP2 can share out: of one type, with an axis to cut along."""
    # Sparse gradients cannot be cut, and what a forward writes into a gathered copy would be lost.
    looked_up = {
        id(submodule.weight)
        for submodule in module.modules()
        if isinstance(submodule, (nn.Embedding, nn.EmbeddingBag, DistributedEmbedding))
        and (submodule.sparse or submodule.max_norm is not None)
    }
    able = {
        id(parameter): parameter
        for name, parameter in module.named_parameters()
        if name in names
        and parameter.dim() > 0
        and parameter.layout is torch.strided
        and parameter.is_floating_point()  # quantized weights have their scales beside them
        and not isinstance(parameter, DTensor)
        and id(parameter) not in looked_up
        and not has_hooks(parameter)  # FSDP2 would put another in its place
    }
    elements: Counter[torch.dtype] = Counter()
    for parameter in able.values():
        elements[parameter.dtype] += parameter.numel()
    usual = elements.most_common(1)[0][0] if elements else None
    return {number for number, parameter in able.items() if parameter.dtype is usual}


def _own_parameters(units: Sequence[nn.Module], chosen: Collection[int]) -> list[list[nn.Parameter]]:
    """Return the parameters of every unit that no earlier one has."""
    seen: set[int] = set()
    own = []
    for unit in units:
        own.append(
            [
                parameter
                for parameter in unit.parameters()
                if id(parameter) in chosen and id(parameter) not in seen
            ]
        )
        seen.update(map(id, own[-1]))
    return own


def made_equal(parameters: Sequence[nn.Parameter], group: dist.ProcessGroup) -> None:
    """Give all ranks of ``group`` the first one's values."""
    for parameter in parameters:
        make_contiguous(parameter)
        dist.broadcast(parameter.detach(), group=group, group_src=0)
