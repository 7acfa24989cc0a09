"""Putting partial state dicts together; pure.

A partial dict has the key ``_smp_is_partial`` with a true value. A model's has some of the names,
an optimizer's has all parameter groups and the state of some parameters, under the numbers that the whole
optimizer would give them. So parts from any partition can be united, and a full dict is one that plain
PyTorch reads.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any

from opensmd.modelparallel.exceptions import SMPCheckpointError

__all__ = ["PARTIAL", "is_partial", "marked", "merge_optimizers", "merge_trees", "with_versions"]

PARTIAL = "_smp_is_partial"


def is_partial(given: Any) -> bool:
    """Whether this is a partial state dict."""
    return isinstance(given, Mapping) and bool(given.get(PARTIAL, False))


def marked(given: Mapping[str, Any]) -> dict[str, Any]:
    """A state dict without its mark."""
    return with_versions({name: value for name, value in given.items() if name != PARTIAL}, given)


def with_versions(entries: Mapping[str, Any], source: Mapping[str, Any]) -> dict[str, Any]:
    """``entries`` with the versions of modules, which torch keeps as an attribute, of ``source``.

    Without them a module takes what it loads for something of its first version, and may convert it.
    """
    if not hasattr(source, "_metadata"):
        return dict(entries)
    made: OrderedDict[str, Any] = OrderedDict(entries)
    made._metadata = source._metadata  # type: ignore[attr-defined]
    return made


def merge_trees(parts: Sequence[Any]) -> Any:
    """Unite what every rank of a replica saved: partial dicts become full ones, wherever they are in it.

    Of all other values, those of the first part are taken.

    Raises:
        SMPCheckpointError: the parts have different structures.
    """
    first = parts[0]
    if any(is_partial(part) for part in parts):
        if not all(is_partial(part) for part in parts):
            raise SMPCheckpointError("some parts of this checkpoint are partial state dicts and some are not")
        if "param_groups" in first and "state" in first:
            return merge_optimizers(parts)
        merged: dict[str, Any] = {}
        for part in parts:
            for name, value in marked(part).items():
                merged.setdefault(name, value)
        return with_versions(merged, first)
    if isinstance(first, dict):
        return {
            key: merge_trees([part[key] for part in parts])
            if all(isinstance(part, dict) and key in part for part in parts)
            else value
            for key, value in first.items()
        }
    return first


def merge_optimizers(parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Unite partial optimizer state dicts.

    Raises:
        SMPCheckpointError: their parameter groups differ.
    """
    layout = [group["params"] for group in parts[0]["param_groups"]]
    for rank, part in enumerate(parts):
        found = [group["params"] for group in part["param_groups"]]
        if found != layout:
            raise SMPCheckpointError(
                f"partial optimizer state dicts do not belong together: part 0 has groups of "
                f"{list(map(len, layout))} parameters, part {rank} of {list(map(len, found))}"
            )
    state: dict[Any, Any] = {}
    for part in parts:
        for number, value in part["state"].items():
            state.setdefault(number, value)
    ordered = sorted(state, key=lambda number: (not isinstance(number, int), number))
    return {
        **marked(parts[0]),
        "state": {number: state[number] for number in ordered},
        "param_groups": [dict(group) for group in parts[0]["param_groups"]],
    }
