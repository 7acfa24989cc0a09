"""What the state dicts of a distributed optimizer are made of: numbered parameters and their entries.

Plain PyTorch numbers an optimizer's parameters; a rank keeps some of them, and of those it may have slices.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from opensmd.modelparallel.exceptions import SMPCheckpointError
from opensmd.modelparallel.ranks.grid import CommGroup
from opensmd.modelparallel.ranks.shards import Shard
from opensmd.modelparallel.state import state
from opensmd.modelparallel.state_dicts.distributed_parts import cut_entry, slices_in, whole_entries
from opensmd.modelparallel.state_dicts.gather import unite
from opensmd.modelparallel.state_dicts.merge import is_partial, merge_optimizers

__all__ = ["Layout", "gathered_entries", "merged_parts", "slices_of_entries", "sliced_entries"]


@dataclass
class Layout:
    """The whole optimizer's parameters, as plain PyTorch numbers them.

    Attributes:
        numbers: for every group, the numbers of all its parameters.
        names: for every group, the names that the script gave with its parameters, if it did.
        full_names: the module's name of every parameter, by number.
        shapes: the shape of every parameter, by number.
        local: the number of each parameter of this rank, by identity.
    """

    numbers: list[list[int]] = field(default_factory=list)
    names: list[list[str] | None] = field(default_factory=list)
    full_names: list[str] = field(default_factory=list)
    shapes: list[torch.Size] = field(default_factory=list)
    local: dict[int, int] = field(default_factory=dict)

    @property
    def count(self) -> int:
        return sum(map(len, self.numbers))


def _flat(own: Mapping[Any, Any]) -> dict[tuple[Any, Any], Any]:
    return {(number, key): each for number, entries in own.items() for key, each in entries.items()}


def gathered_entries(
    own: Mapping[Any, Any], layout: Layout | None = None, *, only_first: bool = False
) -> dict[Any, Any]:
    """The state of all ranks' parameters, by number; with a ``layout``, slices of tensors become whole."""
    flat = _flat(own)
    if layout is not None and state.model is not None:
        flat = whole_entries(flat, _shards_of_entries(flat, layout, state.model.shards))
    united = unite(flat, group=state.groups[CommGroup.PP_GROUP], only_first=only_first)
    gathered: dict[Any, Any] = {}
    for number, key in sorted(united, key=lambda each: each[0]):
        gathered.setdefault(number, {})[key] = united[(number, key)]
    return gathered


def slices_of_entries(own: Mapping[Any, Any], layout: Layout) -> list[list[Any]]:
    """What a partial state dict says of the entries that are slices."""
    if state.model is None:
        return []
    flat = _flat(own)
    return slices_in(flat, _shards_of_entries(flat, layout, state.model.shards))


def _shards_of_entries(
    flat: Mapping[tuple[Any, Any], Any], layout: Layout, shards: Mapping[str, Shard]
) -> dict[tuple[Any, Any], Shard]:
    """How the tensors of an optimizer's state are split: as their parameters, where they have their shape."""
    return {
        (number, key): shards[layout.full_names[number]]
        for (number, key), each in flat.items()
        if isinstance(number, int)
        and layout.full_names[number] in shards
        and isinstance(each, torch.Tensor)
        and each.shape == layout.shapes[number]
    }


def sliced_entries(
    given: Mapping[str, Any],
    names: list[str],
    layout: Layout | None,
    parameters: list[torch.nn.Parameter],
) -> dict[Any, Any]:
    """The state of a full state dict, with this rank's slices of what is split."""
    assert state.model is not None
    stored = [number for group in given["param_groups"] for number in group["params"]]
    if layout is None:
        own: dict[int, torch.Tensor] = dict(enumerate(parameters))
    else:
        own = {index: torch.empty(shape, device="meta") for index, shape in enumerate(layout.shapes)}
        # others may be slices of their parameters that the replicas share out
        own |= {layout.local[id(each)]: each for each in parameters if isinstance(each, DTensor)}
    sliced = dict(given["state"])
    for index, (number, name) in enumerate(zip(stored, names, strict=True)):
        shard = state.model.shards.get(name)
        if number in sliced:
            sliced[number] = {
                key: cut_entry(each, shard, own[index]) if _has_axes(each) else each
                for key, each in sliced[number].items()
            }
    return sliced


def _has_axes(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dim() > 0


def merged_parts(given: Mapping[str, Any]) -> dict[str, Any]:
    """The full state dict of which every rank of the replica gave a part."""
    group = state.require("load_state_dict").groups[CommGroup.PP_GROUP]
    layouts: list[Any] = [None] * dist.get_world_size(group)
    mine = {"param_groups": [], **given, "state": {}} if is_partial(given) else None
    dist.all_gather_object(layouts, mine, group=group)
    if None in layouts:
        raise SMPCheckpointError("some ranks gave a full optimizer state dict and some a partial one")
    merged = merge_optimizers(layouts)
    merged["state"] = gathered_entries(given["state"])
    return merged
