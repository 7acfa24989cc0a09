"""Moving an optimizer's state after its parameters.

A model on the CPU goes to the GPU with its first step. Loaded state, and what some optimizers create with
themselves, is on the CPU until then.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from opensmd.modelparallel.state_dicts.by_parameter import by_parameter

__all__ = ["move_state"]


def move_state(entries: Mapping[Any, Any], groups: Sequence[Mapping[str, Any]]) -> None:
    """Move an optimizer's state to where loading it would put it: to the devices of its parameters.

    Args:
        entries: by parameter; other keys are left alone.
        groups: the optimizer's. Its ``step`` stays on the CPU without ``fused`` and ``capturable``.
    """
    counted_there = {
        id(parameter)
        for group in groups
        if group.get("fused") or group.get("capturable")
        for parameter in group["params"]
    }
    for parameter, own in by_parameter(entries):
        for key, value in own.items():
            if isinstance(value, Tensor) and (key != "step" or id(parameter) in counted_there):
                own[key] = value.to(parameter.device)
