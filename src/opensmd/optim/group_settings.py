"""What an optimizer's group of parameters is trained with, apart from which parameters these are."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ["group_settings"]

_OF_PARAMETERS = ("params", "param_names")


def group_settings(group: Mapping[str, Any]) -> dict[str, Any]:
    """All that a group, or the one of a state dict, says besides its parameters, such as a learning rate."""
    return {key: value for key, value in group.items() if key not in _OF_PARAMETERS}
