"""Merging partial state dicts; pure.

A partial dict has the key ``_smp_is_partial`` with a true value. A model's has some of the names; an
optimizer's has all parameter groups and the state of some parameters, under the numbers that the whole
optimizer would give them. So parts from any partitions can be merged, and plain PyTorch can read a full dict.
Where ranks share tensors, the key ``_smp_slices`` says which entries of a part are slices.
"""

from __future__ import annotations

import functools
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from opensmd.modelparallel.exceptions import SMPCheckpointError

__all__ = [
    "COUNT",
    "FLAT",
    "MODULE",
    "PARTIAL",
    "SLICES",
    "flat_state",
    "is_partial",
    "marked",
    "merge_optimizers",
    "merge_trees",
    "nested_state",
    "whole_later",
    "with_versions",
]

PARTIAL = "_smp_is_partial"
SLICES = "_smp_slices"
MODULE, FLAT, COUNT = "module", "fp32_flat_groups", "partition_count"  # see ``saving.sharded_names``
_TYPES = {MODULE: Mapping, FLAT: list, COUNT: int}  # unlike any entry of a state dict


def is_partial(state_dict: Any) -> bool:
    """Whether this is a partial state dict."""
    return isinstance(state_dict, Mapping) and bool(state_dict.get(PARTIAL, False))


def marked(state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """Return a state dict without its marks, and without what is there only for scripts to look up."""
    return with_versions(
        {name: value for name, value in state_dict.items() if not _is_mark(name, value)}, state_dict
    )


def _is_mark(name: str, value: Any) -> bool:
    return name in (PARTIAL, SLICES) or (name in _TYPES and isinstance(value, _TYPES[name]))


def with_versions(entries: Mapping[str, Any], source: Mapping[str, Any]) -> dict[str, Any]:
    """Copy the module versions of ``source``, which torch keeps as an attribute, to ``entries``.

    Without them, a module assumes that what it loads is from its first version, and may convert it.
    """
    if not hasattr(source, "_metadata"):
        return dict(entries)
    versioned: OrderedDict[str, Any] = OrderedDict(entries)
    versioned._metadata = source._metadata  # type: ignore[attr-defined]
    return versioned


def merge_trees(parts: Sequence[Any], *, tensor: int = 1) -> Any:
    """Merge what every rank of a replica saved, turning partial dicts at any depth into full ones.

    All other values come from the first part.

    Args:
        parts: by stage; within one, by tensor-parallel rank.
        tensor: how many ranks share each tensor.

    Raises:
        SMPCheckpointError: the parts have different structures, or do not say which entries are slices.
    """
    first = parts[0]
    if any(is_partial(part) for part in parts):
        if not all(is_partial(part) for part in parts):
            raise SMPCheckpointError("some parts of this checkpoint are partial state dicts and some are not")
        if "param_groups" in first and "state" in first:
            return merge_optimizers(parts, tensor=tensor)
        merged = _united([marked(part) for part in parts], _axes(parts, tensor), tensor)
        return with_versions(merged, first)
    if isinstance(first, dict):
        return {
            key: merge_trees([part[key] for part in parts], tensor=tensor)
            if all(isinstance(part, dict) and key in part for part in parts)
            else value
            for key, value in first.items()
        }
    return first


def merge_optimizers(parts: Sequence[Mapping[str, Any]], *, tensor: int = 1) -> dict[str, Any]:
    """Merge partial optimizer state dicts; the arguments are those of :func:`merge_trees`.

    Raises:
        SMPCheckpointError: their parameter groups differ.
    """
    layout = [group["params"] for group in parts[0]["param_groups"]]
    for rank, part in enumerate(parts):
        numbers = [group["params"] for group in part["param_groups"]]
        if numbers != layout:
            raise SMPCheckpointError(
                f"partial optimizer state dicts do not belong together: part 0 has groups of "
                f"{list(map(len, layout))} parameters, part {rank} of {list(map(len, numbers))}"
            )
    united = _united([flat_state(part["state"]) for part in parts], _axes(parts, tensor), tensor)
    return {
        **marked(parts[0]),
        "state": nested_state(united, [number for part in parts for number in part["state"]]),
        "param_groups": [dict(group) for group in parts[0]["param_groups"]],
    }


def flat_state(state: Mapping[Any, Any]) -> dict[tuple[Any, Any], Any]:
    """Return an optimizer's entries by number and key; anything but a dict is one entry without a key."""
    return {
        (number, key): value
        for number, entries in state.items()
        for key, value in (entries.items() if isinstance(entries, Mapping) else [(None, entries)])
    }


def nested_state(flat: Mapping[tuple[Any, Any], Any], numbers: Iterable[Any] = ()) -> dict[Any, Any]:
    """Undo :func:`flat_state`, in order; ``numbers`` without entries get an empty dict."""
    state: dict[Any, Any] = {number: {} for number in [*numbers, *(number for number, _ in flat)]}
    for (number, key), value in flat.items():
        if key is None:
            state[number] = value
        else:
            state[number][key] = value
    # What an optimizer keeps under keys of its own comes last.
    ordered = sorted(state, key=lambda number: (not isinstance(number, int), number))
    return {number: state[number] for number in ordered}


def whole_later(parts: Sequence[Mapping[str, Any]], *, tensor: int) -> dict[str, Callable[[], Any]]:
    """Return the entries of a model's partial state dicts, each of which is merged on demand.

    The arguments are those of :func:`merge_trees`.

    Raises:
        SMPCheckpointError: the parts do not say which entries are slices.
    """
    axes = _axes(parts, tensor)
    pieces = _pieces([marked(part) for part in parts], tensor)
    return {name: functools.partial(_entry, name, own, axes, tensor) for name, own in pieces.items()}


def _axes(parts: Sequence[Mapping[str, Any]], tensor: int) -> dict[Any, tuple[int, int]]:
    """Return the axis of all split entries, and the whole size along it."""
    if tensor == 1:
        return {}
    if not all(SLICES in part for part in parts):
        raise SMPCheckpointError(
            f"{len(parts)} parts are of ranks that shared tensors, and do not say which; load them with the "
            f"same degrees ({len(parts) // tensor} partitions of {tensor} tensor-parallel ranks)"
        )
    return {name: (axis, size) for part in parts for name, axis, size in part[SLICES]}


def _united(
    parts: Sequence[Mapping[Any, Any]], axes: Mapping[Any, tuple[int, int]], tensor: int
) -> dict[Any, Any]:
    """Merge the entries of all parts, and slices into whole tensors."""
    return {name: _entry(name, own, axes, tensor) for name, own in _pieces(parts, tensor).items()}


def _pieces(parts: Sequence[Mapping[Any, Any]], tensor: int) -> dict[Any, list[Any]]:
    """Return the pieces of each entry, from the first group of tensor-parallel ranks that has it."""
    pieces: dict[Any, list[Any]] = {}
    for first in range(0, len(parts), tensor):
        sharing = parts[first : first + tensor]
        for name in dict.fromkeys(name for part in sharing for name in part):
            if name not in pieces:
                pieces[name] = [part[name] for part in sharing if name in part]
    return pieces


def _entry(name: Any, pieces: list[Any], axes: Mapping[Any, tuple[int, int]], tensor: int) -> Any:
    return _whole(name, pieces, *axes[name], tensor) if name in axes else pieces[0]


def _whole(name: Any, pieces: Sequence[Any], axis: int, size: int, tensor: int) -> Any:
    if len(pieces) != tensor or sum(piece.shape[axis] for piece in pieces) != size:
        raise SMPCheckpointError(
            f"{name}: {len(pieces)} slices of shapes {[tuple(piece.shape) for piece in pieces]} are not the "
            f"whole of {size} along axis {axis}"
        )
    return torch.cat(list(pieces), dim=axis)
