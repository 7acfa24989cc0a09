"""Translating an optimizer's whole state dict between a distributed model's parameters and the original's.

State tensors with a parameter's shape are translated like the parameter; everything else, such as step
counts, is copied. Numbers are matched through names. Pure.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from opensmd.modelparallel.tensor_parallel.huggingface.originals import (
    as_distributed,
    as_original,
    originals_in,
    parameters_of_original,
)
from opensmd.optim.param_groups import params_of

__all__ = ["fitting_state", "original_state"]

NAMES = "param_names"  # torch's key for them in a group
WRAPPED = "module."  # the prefix of names from a wrapper such as smp.DistributedModel
Entries = dict[str, dict[str, Any]]
Translate = Callable[[nn.Module, Mapping[str, Any]], dict[str, Any]]


@dataclass(frozen=True)
class _Layout:
    """One of the two layouts: names of each group, and shapes where they differ from the other's."""

    groups: list[list[str]]
    shapes: dict[str, torch.Size]

    @property
    def names(self) -> list[str]:
        return [name for group in self.groups for name in group]

    def fits(self, state_dict: Mapping[str, Any]) -> bool:
        """Whether a state dict has groups of these sizes, and tensors of these shapes."""
        sizes = [len(group["params"]) for group in state_dict["param_groups"]]
        if sizes != [len(names) for names in self.groups]:
            return False
        return all(
            tensor.shape == self.shapes.get(name, tensor.shape)
            for name, entries in _by_name(state_dict, self.names).items()
            for tensor in entries.values()
            if _is_like_a_parameter(tensor)
        )


def original_state(
    module: nn.Module, state_dict: Mapping[str, Any], groups: Sequence[Sequence[str]]
) -> dict[str, Any]:
    """Return the state dict that the original model's optimizer would have, with its parameters' names.

    It is unchanged if it has tensors of other shapes than their parameters', such as Adafactor's.

    Args:
        module: the distributed model.
        state_dict: a whole state dict.
        groups: the names of each group's parameters.
    """
    here, there = _both_layouts(module, groups)
    if not originals_in(module) or not here.fits(state_dict):
        return dict(state_dict)
    sources = {new: [old] for old, news in _sources(module).items() for new in news}
    entries = _translated(module, _by_name(state_dict, here.names), sources, as_original)
    return _numbered(state_dict, entries, there.groups, with_names=True)


def fitting_state(
    module: nn.Module, state_dict: Mapping[str, Any], groups: Sequence[Sequence[str]]
) -> dict[str, Any]:
    """Return a whole state dict for this model's parameters, given one for these or for the original's.

    With parameter names in its groups, its parameters may also be in other groups. What fits neither way is
    unchanged.

    Raises:
        ValueError: it is for the original's parameters and cannot be translated.
    """
    here, there = _both_layouts(module, groups)
    if len(state_dict["param_groups"]) != len(here.groups):
        return dict(state_dict)
    names = _names_in(state_dict, there.names)
    is_of_original = set(there.names) != set(here.names)
    if here.fits(state_dict) and (names is None or not is_of_original):
        return dict(state_dict)
    if names is None and not there.fits(state_dict):
        return dict(state_dict)
    entries = _by_name(state_dict, there.names if names is None else names)
    if is_of_original:
        _require_shapes(entries, there.shapes)
    translated = _translated(module, entries, _sources(module), as_distributed)
    return _numbered(state_dict, translated, here.groups, with_names=names is not None)


def _both_layouts(module: nn.Module, groups: Sequence[Sequence[str]]) -> tuple[_Layout, _Layout]:
    sources = _sources(module)
    order = {name: number for number, (name, _) in enumerate(parameters_of_original(module))}
    originals = originals_in(module)
    shapes = {
        place + name: shape
        for place, original in originals.items()
        for name, (_, shape) in original.here.items()
    }
    theirs = {
        place + name: shape
        for place, original in originals.items()
        for name, shape in original.shapes.items()
    }
    there = [
        sorted((new for name in group for new in sources.get(name, [name])), key=lambda name: order[name])
        for group in groups
    ]
    return _Layout([list(group) for group in groups], shapes), _Layout(there, theirs)


def _sources(module: nn.Module) -> dict[str, list[str]]:
    """Return the original parameters that each parameter is made of; others map to their own names."""
    return {
        place + name: [place + source for source in names]
        for place, original in originals_in(module).items()
        for name, (names, _) in original.here.items()
    }


def _by_name(state_dict: Mapping[str, Any], names: Sequence[str]) -> Entries:
    stored = params_of(state_dict["param_groups"])
    return {
        name: state_dict["state"][number]
        for name, number in zip(names, stored, strict=True)
        if number in state_dict["state"]
    }


def _require_shapes(entries: Entries, shapes: Mapping[str, torch.Size]) -> None:
    for name, own in entries.items():
        for key, tensor in own.items():
            if _is_like_a_parameter(tensor) and tensor.shape != shapes.get(name, tensor.shape):
                raise ValueError(
                    "the loaded optimizer state is of the model without smp.tensor_parallelism, and its "
                    f"{key} of {name}, of shape {tuple(tensor.shape)}, cannot be translated: the parameter's "
                    f"shape is {tuple(shapes[name])}. Nothing has been changed; leave the optimizer out"
                )


def _names_in(state_dict: Mapping[str, Any], expected: Sequence[str]) -> list[str] | None:
    """Return the names in a state dict's groups, if they are the expected ones in any order."""
    groups = state_dict["param_groups"]
    if not all(len(group.get(NAMES) or ()) == len(group["params"]) for group in groups):
        return None
    names = [name for group in groups for name in group.get(NAMES) or ()]
    for candidates in (names, [name.removeprefix(WRAPPED) for name in names]):
        if sorted(candidates) == sorted(expected):
            return candidates
    return None


def _translated(
    module: nn.Module, entries: Entries, sources: Mapping[str, list[str]], translate: Translate
) -> Entries:
    translated_names = {old for olds in sources.values() for old in olds}
    origins = {**{name: [name] for name in entries if name not in translated_names}, **sources}
    translated: Entries = {}
    for new, olds in origins.items():
        having = [old for old in olds if old in entries]
        if having and having != olds:
            missing = sorted(set(olds) - set(having))
            raise ValueError(
                f"the loaded optimizer state has entries of {', '.join(having)}, but not of "
                f"{', '.join(missing)}: all of these are one parameter here. Nothing has been changed"
            )
        if having:
            translated[new] = {key: _own_copy(value) for key, value in entries[olds[0]].items()}
    for key in dict.fromkeys(key for entry in entries.values() for key in entry):
        tensors = {
            name: entry[key] for name, entry in entries.items() if _is_like_a_parameter(entry.get(key))
        }
        for name, tensor in translate(module, tensors).items():
            translated[name][key] = tensor
    return translated


def _numbered(
    state_dict: Mapping[str, Any], entries: Entries, groups: list[list[str]], *, with_names: bool
) -> dict[str, Any]:
    """Return a state dict like the given one, with these entries and groups."""
    numbers = {name: number for number, name in enumerate(name for group in groups for name in group)}
    numbered = []
    for group, names in zip(state_dict["param_groups"], groups, strict=True):
        own = {key: value for key, value in group.items() if key != NAMES}
        own["params"] = [numbers[name] for name in names]
        numbered.append({**own, NAMES: list(names)} if with_names else own)
    others = {key: value for key, value in state_dict["state"].items() if not isinstance(key, int)}
    state = {numbers[name]: entries[name] for name in sorted(entries, key=lambda name: numbers[name])}
    return {**state_dict, "state": {**state, **others}, "param_groups": numbered}


def _own_copy(value: Any) -> Any:
    """Copy a value for each of several parameters, because all would increment a shared count."""
    is_scalar = isinstance(value, torch.Tensor) and not _is_like_a_parameter(value)
    return value.clone() if is_scalar else value


def _is_like_a_parameter(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.numel() != 1
