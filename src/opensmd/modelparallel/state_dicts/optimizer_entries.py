"""Entries of a distributed optimizer's state dicts: gathered from all ranks, or cut to this one.

Plain PyTorch numbers an optimizer's parameters. A rank keeps some of them, perhaps only slices.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from opensmd.modelparallel.exceptions import SMPCheckpointError, SMPError
from opensmd.modelparallel.precision.layout import Layout
from opensmd.modelparallel.ranks.exchange import exchange
from opensmd.modelparallel.ranks.grid import CommGroup
from opensmd.modelparallel.ranks.shards import Shard
from opensmd.modelparallel.state import state
from opensmd.modelparallel.state_dicts.distributed_parts import cut_entry, slices_in, whole_entries
from opensmd.modelparallel.state_dicts.gather import unite
from opensmd.modelparallel.state_dicts.merge import flat_state, is_partial, merge_optimizers, nested_state
from opensmd.optim.param_groups import params_of

__all__ = [
    "gathered_entries",
    "merged_parts",
    "require_same_numbers",
    "slices_of_entries",
    "sliced_entries",
    "unsliced_state",
]


def gathered_entries(
    own: Mapping[Any, Any], layout: Layout | None = None, *, only_first: bool = False
) -> dict[Any, Any]:
    """Gather the state of all ranks' parameters, by number; with a ``layout``, slices become whole.

    Raises:
        SMPError: on all ranks, if their optimizers number different parameters.
    """
    flat = flat_state(own)
    if layout is not None:
        require_same_numbers(layout, "optimizer.state_dict()")
        flat = whole_entries(flat, _shards_of_entries(flat, layout))
    return nested_state(unite(flat, group=state.groups[CommGroup.PP_GROUP], only_first=only_first))


def require_same_numbers(layout: Layout, name: str) -> None:
    """Require that the pipeline's ranks have numbered the same parameters; all of them must call.

    Args:
        name: what the script has called.

    Raises:
        SMPError: on all of them, if they have not.
    """
    group = state.groups[CommGroup.PP_GROUP]
    names = exchange(layout.full_names, group)
    if any(other != names[0] for other in names):
        raise SMPError(
            f"{name}: the optimizers of the pipeline's ranks have different parameters, so that entries of "
            "one would replace those of another. Make the optimizer of model.parameters(), not of "
            "model.local_parameters(), on all ranks: it keeps what lives on its own"
        )


def slices_of_entries(own: Mapping[Any, Any], layout: Layout) -> list[list[Any]]:
    """Return a partial state dict's description of its slices."""
    flat = flat_state(own)
    return slices_in(flat, _shards_of_entries(flat, layout))


def _shards_of_entries(flat: Mapping[tuple[Any, Any], Any], layout: Layout) -> dict[tuple[Any, Any], Shard]:
    """Return how an optimizer's state tensors are split: like their parameters, if they have their shape."""
    shards = layout.model.shards
    return {
        (number, key): shards[layout.full_names[number]]
        for (number, key), value in flat.items()
        if isinstance(number, int)
        and layout.full_names[number] in shards
        and isinstance(value, torch.Tensor)
        and value.shape == layout.shapes[number]
    }


def sliced_entries(
    state_dict: Mapping[str, Any],
    names: list[str],
    shards: Mapping[str, Shard],
    layout: Layout | None,
    parameters: list[torch.nn.Parameter],
) -> dict[Any, Any]:
    """Return the state of a full state dict, cut to this rank's slices (``shards``, by name)."""
    stored = params_of(state_dict["param_groups"])
    if layout is None:
        own: dict[int, torch.Tensor] = dict(enumerate(parameters))
    else:
        own = {index: torch.empty(shape, device="meta") for index, shape in enumerate(layout.shapes)}
        # others may be slices that the replicas share
        own |= {
            layout.local[id(parameter)]: parameter
            for parameter in parameters
            if isinstance(parameter, DTensor)
        }
    sliced = dict(state_dict["state"])
    for index, (number, name) in enumerate(zip(stored, names, strict=True)):
        shard = shards.get(name)
        if number in sliced:
            sliced[number] = {
                key: cut_entry(value, shard, own[index]) if _has_axes(value) else value
                for key, value in sliced[number].items()
            }
    return sliced


def unsliced_state(state_dict: Mapping[str, Any], optimizer: Any) -> dict[str, Any]:
    """Return a state dict of all parameters with whole tensors, before the first step has cut the model.

    All tensor-parallel ranks must call.
    """
    if state.model is None or state.cfg.tensor_parallel_degree == 1:
        return dict(state_dict)
    stored = params_of(state_dict["param_groups"])
    parameters = params_of(optimizer.param_groups)
    names = optimizer._smp_names()
    known = dict(zip(stored, zip(names, parameters, strict=True), strict=True))
    shards = state.model.shards
    flat = flat_state({number: entries for number, entries in state_dict["state"].items() if number in known})
    split = {
        (number, key): shards[known[number][0]]
        for (number, key), value in flat.items()
        if known[number][0] in shards
        and isinstance(value, torch.Tensor)
        and value.shape == known[number][1].shape
    }
    entries = dict(state_dict["state"])
    for (number, key), value in whole_entries(flat, split).items():
        entries[number] = {**entries[number], key: value}
    return {**state_dict, "state": entries}


def _has_axes(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dim() > 0


def merged_parts(state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """Merge the parts of all ranks of the replica into a full state dict."""
    group = state.require("load_state_dict").groups[CommGroup.PP_GROUP]
    mine = {"param_groups": [], **state_dict, "state": {}} if is_partial(state_dict) else None
    layouts = exchange(mine, group)
    if None in layouts:
        raise SMPCheckpointError("some ranks gave a full optimizer state dict and some a partial one")
    merged = merge_optimizers(layouts)
    merged["state"] = gathered_entries(state_dict["state"])
    return merged
