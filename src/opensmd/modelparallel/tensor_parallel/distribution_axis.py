"""What scripts of later versions ask about a parameter's layout."""

from __future__ import annotations

from typing import Any

from opensmd.modelparallel.state import state

__all__ = ["get_distribution_axis"]


def get_distribution_axis(parameter: Any) -> int | None:
    """Return the axis along which tensor parallelism splits a parameter of the wrapped model, or None."""
    if state.model is None:
        return None
    shards = state.model.shards
    named = state.model.get_module().named_parameters(remove_duplicate=False)
    return next((shards[name].axis for name, one in named if one is parameter and name in shards), None)
