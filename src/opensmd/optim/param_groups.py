"""What an optimizer's groups, or those of its state dict, consist of: their parameters and their settings."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

__all__ = ["group_settings", "params_of"]

_OF_PARAMETERS = ("params", "param_names")


def params_of(groups: Iterable[Mapping[str, Any]]) -> list[Any]:
    """Return the parameters of all groups, in order; of a state dict's groups, their numbers."""
    return [parameter for group in groups for parameter in group["params"]]


def group_settings(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return all of a group (or a state dict's group) except its parameters, such as the learning rate."""
    return {key: value for key, value in group.items() if key not in _OF_PARAMETERS}
