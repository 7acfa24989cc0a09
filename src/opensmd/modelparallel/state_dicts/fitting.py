"""Whether a whole optimizer state dict fits the optimizer that is to load it; asked before anything changes.

torch's optimizers load the state of any other, and fail in the next step for want of a key.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from opensmd.modelparallel.wrapped import WrappedOptimizer
from opensmd.optim.param_groups import group_settings, params_of

__all__ = [
    "has_parameters_shapes",
    "require_optimizer_state",
    "require_same_groups",
    "require_same_kind",
    "require_same_shapes",
]

_MODULES = ("torch.optim.", "opensmd.optim.")
# Adam and its siblings have the same settings as Adamax, and keep something else.
_SECOND_MOMENTS = ("exp_avg_sq", "exp_inf")


def require_optimizer_state(state_dict: Mapping[str, Any]) -> None:
    """Refuse what is no optimizer's state dict.

    Raises:
        ValueError: it has no groups or no state.
    """
    if "param_groups" not in state_dict or "state" not in state_dict:
        raise ValueError(
            f"this is not an optimizer state dict: it has the keys {sorted(map(str, state_dict))[:5]}, and "
            "lacks 'state' or 'param_groups'"
        )


def require_same_groups(sizes: Sequence[int], state_dict: Mapping[str, Any]) -> None:
    """Refuse a state dict whose groups have other sizes than the optimizer's.

    Raises:
        ValueError: the sizes differ.
    """
    saved_sizes = [len(group["params"]) for group in state_dict["param_groups"]]
    if saved_sizes != sizes:
        raise ValueError(
            f"the loaded optimizer state has parameter groups of sizes {saved_sizes}, this optimizer of "
            f"{sizes}"
        )


def require_same_kind(optimizer: torch.optim.Optimizer, state_dict: Mapping[str, Any]) -> None:
    """Refuse a state dict with which the next step would fail; of other libraries' optimizers nobody knows.

    Raises:
        ValueError: its groups lack settings, or its state what such an optimizer keeps.
    """
    kind = _kind(optimizer)
    if kind is None:
        return
    lacking = _lacking_settings(optimizer, kind, state_dict["param_groups"])
    if "betas" in optimizer.defaults:
        own, other = _SECOND_MOMENTS if kind.__name__ != "Adamax" else reversed(_SECOND_MOMENTS)
        if any(
            other in entry and own not in entry
            for entry in state_dict["state"].values()
            if isinstance(entry, Mapping)
        ):
            lacking.append(own)
    if lacking:
        raise ValueError(
            f"the loaded optimizer state is of another kind of optimizer than {kind.__name__}, which needs "
            f"{', '.join(lacking)}; its settings are {', '.join(_settings(state_dict))}. Nothing has "
            "been changed"
        )


def has_parameters_shapes(optimizer: torch.optim.Optimizer) -> bool:
    """Whether an optimizer's state tensors have their parameter's shape, or one element.

    That holds for all of torch's and ours except those that store factors; others may store anything.
    """
    kind = type(optimizer)
    return kind.__module__.startswith(_MODULES) and kind.__name__ != "Adafactor"


def require_same_shapes(shapes: Sequence[torch.Size], state_dict: Mapping[str, Any]) -> None:
    """Refuse a state dict whose tensors have other shapes than the parameters.

    Args:
        shapes: those of all parameters, in the whole optimizer's order.

    Raises:
        ValueError: shapes differ; the message names the first five.
    """
    stored = params_of(state_dict["param_groups"])
    wrong = [
        f"{key} of parameter {number}: {tuple(tensor.shape)} in the checkpoint, {tuple(shape)} here"
        for number, shape in zip(stored, shapes, strict=True)
        for key, tensor in state_dict["state"].get(number, {}).items()
        if isinstance(tensor, torch.Tensor) and tensor.numel() != 1 and tensor.shape != shape
    ]
    if wrong:
        raise ValueError(
            f"the loaded optimizer state does not fit the parameters: {'; '.join(wrong[:5])}"
            f"{f'; and {len(wrong) - 5} more' if len(wrong) > 5 else ''}. Nothing has been changed"
        )


def _kind(optimizer: torch.optim.Optimizer) -> type[torch.optim.Optimizer] | None:
    """Which of torch's optimizers or ours this is, or extends; None for others."""
    for base in type(optimizer).__mro__:
        if base is torch.optim.Optimizer:
            return None
        is_own = issubclass(base, torch.optim.Optimizer) and not issubclass(base, WrappedOptimizer)
        if is_own and base.__module__.startswith(_MODULES):
            return base
    return None


def _lacking_settings(
    optimizer: torch.optim.Optimizer, kind: type[torch.optim.Optimizer], groups: list[dict[str, Any]]
) -> list[str]:
    """What is in none of the groups, even where newer versions of torch complete those of older ones."""
    needed = [name for name in inspect.signature(kind).parameters if name in optimizer.defaults]
    completed = kind.__new__(kind)
    settings = [{**group_settings(group), "params": []} for group in groups]
    completed.__setstate__({"defaults": dict(optimizer.defaults), "state": {}, "param_groups": settings})
    return [name for name in needed if any(name not in group for group in completed.param_groups)]


def _settings(state_dict: Mapping[str, Any]) -> list[str]:
    return sorted({name for group in state_dict["param_groups"] for name in group_settings(group)})
