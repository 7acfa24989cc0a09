"""The settings with which an optimizer trains a group of parameters."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ["group_settings"]

_OF_PARAMETERS = ("params", "param_names")


def group_settings(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return all of a group (or a state dict's group) except its parameters, such as the learning rate."""
    return {key: value for key, value in group.items() if key not in _OF_PARAMETERS}
