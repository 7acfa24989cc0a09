"""Whether loaded state is of the same kind of optimizer.

torch's optimizers load the state of any other, and fail in the next step for want of a key.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch

from opensmd.modelparallel.wrapped import WrappedOptimizer
from opensmd.optim.group_settings import group_settings

__all__ = ["require_same_kind"]

_PLACES = ("torch.optim.", "opensmd.optim.")
# Adam and its siblings have the same settings as Adamax, and keep something else.
_SECOND_MOMENTS = ("exp_avg_sq", "exp_inf")


def _kind(optimizer: torch.optim.Optimizer) -> type[torch.optim.Optimizer] | None:
    """Which of torch's optimizers or ours this is, or extends; the bare class for others."""
    for base in type(optimizer).__mro__:
        is_own = issubclass(base, torch.optim.Optimizer) and not issubclass(base, WrappedOptimizer)
        if is_own and base.__module__.startswith(_PLACES):
            return base
    return None


def require_same_kind(optimizer: torch.optim.Optimizer, given: Mapping[str, Any]) -> None:
    """Refuse a state dict with which the next step would fail; of other libraries' optimizers nobody knows.

    Raises:
        ValueError: its groups lack settings, or its state what such an optimizer keeps.
    """
    kind = _kind(optimizer)
    if kind is None:
        return
    lacking = _lacking_settings(optimizer, kind, given["param_groups"])
    if "betas" in optimizer.defaults:
        own, other = _SECOND_MOMENTS if kind.__name__ != "Adamax" else reversed(_SECOND_MOMENTS)
        if any(
            other in each and own not in each for each in given["state"].values() if isinstance(each, Mapping)
        ):
            lacking.append(own)
    if lacking:
        raise ValueError(
            f"the loaded optimizer state is of another kind of optimizer than {kind.__name__}, which needs "
            f"{', '.join(lacking)}; its settings are {', '.join(_settings(given))}. Nothing has been changed"
        )


def _lacking_settings(
    optimizer: torch.optim.Optimizer, kind: type[torch.optim.Optimizer], groups: list[dict[str, Any]]
) -> list[str]:
    """What is in none of the groups, even where newer versions of torch complete those of older ones."""
    needed = [name for name in inspect.signature(kind).parameters if name in optimizer.defaults]
    completed = kind.__new__(kind)
    settings = [{**group_settings(each), "params": []} for each in groups]
    completed.__setstate__({"defaults": dict(optimizer.defaults), "state": {}, "param_groups": settings})
    return [name for name in needed if any(name not in group for group in completed.param_groups)]


def _settings(given: Mapping[str, Any]) -> list[str]:
    return sorted({name for group in given["param_groups"] for name in group_settings(group)})
