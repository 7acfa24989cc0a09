"""Collecting tensors from where they live: first a description from each rank, then each tensor once.

A tensor's home broadcasts it without pickling; tensors made of others go part by part. A tensor with several
names (tied weights) travels once and stays tied in the result.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from opensmd.modelparallel.exceptions import SMPCheckpointError, SMPUnsupportedError
from opensmd.modelparallel.ranks.composite import Form, composed, form_of, plain_parts
from opensmd.modelparallel.ranks.exchange import exchange
from opensmd.modelparallel.ranks.gathered import newly_gathered
from opensmd.modelparallel.ranks.sendable import sendable
from opensmd.modelparallel.runtime.tensors.memory_layout import (
    contiguous_strides,
    in_memory_order,
    strides_kept,
)
from opensmd.modelparallel.state_dicts.merge import is_partial, marked, with_versions
from opensmd.modelparallel.state_dicts.missing_tensors import has_data

__all__ = ["collect", "gather_full", "unite"]

Key = TypeVar("Key", bound=Hashable)


@dataclass(frozen=True)
class _Description:
    """A tensor without its data, the twin of another name, or a value that is not a tensor.

    Attributes:
        parts: the plain tensors to send; for an ordinary tensor, just itself.
        form: how the tensor is made of its parts; None for an ordinary one.
        twin: another name of the tensor.
        value: a value that is not a tensor.
    """

    parts: tuple[_Sent, ...] = ()
    form: Form | None = None
    twin: Hashable | None = None
    value: Any = None


@dataclass(frozen=True)
class _Sent:
    """A plain tensor without its data.

    Attributes:
        strides: on arrival, too; none of one that arrives contiguous.
    """

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    device: str


def collect(
    whole: Mapping[str, Any],
    home_of: Callable[[str], int],
    *,
    group: dist.ProcessGroup,
    only_first: bool = False,
) -> dict[str, Any]:
    """Make the entries of a state dict, which are real on different ranks, real everywhere.

    Args:
        whole: all names, in order; those of other ranks are meta tensors.
        home_of: the rank in ``group`` that should have an entry.
        only_first: rank 0 of the group gets everything, the others an empty dict.

    Raises:
        SMPUnsupportedError: on every rank, if an entry is computed from tensors of several ranks.
    """
    me = dist.get_rank(group)
    lacking = [name for name, value in whole.items() if home_of(name) == me and not has_data(value)]
    homes = _owners_of(lacking, whole, group)
    own = {name: value for name, value in whole.items() if homes.get(name, home_of(name)) == me}
    collected = unite(own, group=group, only_first=only_first)
    ordered: OrderedDict[str, Any] = OrderedDict(
        (name, collected[name]) for name in [*whole, *collected] if name in collected
    )
    return with_versions(ordered, whole) if ordered else ordered


def _owners_of(lacking: list[str], whole: Mapping[str, Any], group: dist.ProcessGroup) -> dict[str, int]:
    """Find owners of entries that their home lacks: those that hooks make, buffers computed elsewhere."""
    size = dist.get_world_size(group)
    everyone = exchange(lacking, group)
    missing = [name for names in everyone for name in names]
    if not missing:
        return {}
    everyone = exchange([name for name in missing if name in whole and has_data(whole[name])], group)
    owners = {name: rank for rank in reversed(range(size)) for name in everyone[rank]}
    if nowhere := [name for name in missing if name not in owners]:
        raise SMPUnsupportedError(
            f"the state dict's entries {nowhere[:3]} are computed by code of a module from tensors of "
            "several partitions, and no rank has them all. Place the module whole on one partition with "
            "smp.set_partition"
        )
    return owners


def gather_full(state_dict: Mapping[str, Any], *, group: dist.ProcessGroup) -> dict[str, Any]:
    """Merge the partial state dicts of all ranks of ``group``; every rank gets the full one.

    Raises:
        SMPCheckpointError: on every rank, if some have a full state dict and some a partial one.
    """
    kinds = exchange(is_partial(state_dict), group)
    if not all(kinds):
        full = [rank for rank, partial in enumerate(kinds) if not partial]
        raise SMPCheckpointError(
            f"pp_ranks {full} gave a full state dict and the others a partial one; give the same kind on all"
        )
    return with_versions(unite(marked(state_dict), group=group), state_dict)


def unite(own: Mapping[Key, Any], *, group: dist.ProcessGroup, only_first: bool = False) -> dict[Key, Any]:
    """Merge the entries of all ranks of ``group``; if several have a name, the first rank's counts."""
    me = dist.get_rank(group)
    descriptions = exchange(_describe(own), group)
    united: dict[Key, Any] = {}
    receives = me == 0 or not only_first
    for home, described in enumerate(descriptions):
        for name, description in described.items():
            if name in united:
                continue
            if description.twin is not None:
                united[name] = united[description.twin]
            elif not description.parts:
                united[name] = description.value
            else:
                united[name] = _transfer(own.get(name), description, home, group, only_first)
    return united if receives else {}


def _describe(own: Mapping[Key, Any]) -> dict[Key, _Description]:
    seen: dict[tuple[Any, ...], Key] = {}
    described: dict[Key, _Description] = {}
    for name, value in own.items():
        if not isinstance(value, Tensor):
            described[name] = _Description(value=value)
            continue
        parts = plain_parts(value)
        place = tuple((part.device, part.data_ptr(), part.shape, part.stride(), part.dtype) for part in parts)
        if value.numel() and place in seen:
            described[name] = _Description(twin=seen[place])
            continue
        seen[place] = name
        described[name] = _Description(tuple(map(_without_data, parts)), form_of(value))
    return described


def _without_data(tensor: Tensor) -> _Sent:
    # torch's fused optimizers take a parameter and its state for memory in the same order.
    strides = strides_kept(tensor.shape, tensor.stride())
    return _Sent(tuple(tensor.shape), strides, tensor.dtype, tensor.device.type)


def _transfer(
    own: Tensor | None, description: _Description, home: int, group: dist.ProcessGroup, only_first: bool
) -> Tensor | None:
    """Send one tensor from its home to all ranks, or to the first."""
    me = dist.get_rank(group)
    mine: list[Any] = [None] * len(description.parts)
    if me == home:
        assert own is not None
        mine = plain_parts(own)
    elif only_first and me != 0:
        return None
    parts = [
        _transfer_part(tensor, part, home, group, only_first)
        for tensor, part in zip(mine, description.parts, strict=True)
    ]
    return composed(description.form, iter(parts))


def _transfer_part(
    own: Tensor | None, part: _Sent, home: int, group: dist.ProcessGroup, only_first: bool
) -> Tensor:
    me = dist.get_rank(group)
    if own is not None:
        tensor = own.detach()
    else:
        strides = part.strides or contiguous_strides(part.shape)
        buffer = torch.empty_strided(part.shape, strides, dtype=part.dtype, device=part.device)
        tensor = newly_gathered(buffer)
    sent = sendable(in_memory_order(tensor, part.shape, part.strides) if part.strides else tensor)
    if sent.numel() == 0:
        return tensor
    if not only_first:
        dist.broadcast(sent, group=group, group_src=home)
    elif home != 0:
        if me == home:
            dist.send(sent, group=group, group_dst=0)
        else:
            dist.recv(sent, group=group, group_src=home)
    return tensor
