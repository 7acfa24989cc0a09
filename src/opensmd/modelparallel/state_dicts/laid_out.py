"""Giving a parameter's tensors its own memory layout.

torch's fused optimizers walk the memory of a parameter, its gradient and its state in step, ignoring strides.
With different layouts they silently pair the wrong elements.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from opensmd.modelparallel.state_dicts.by_parameter import by_parameter

__all__ = ["lay_out_state", "laid_out_as"]


def laid_out_as(parameter: Tensor, value: Tensor) -> Tensor:
    """Return a copy of ``value`` with the parameter's strides."""
    copy = torch.empty_strided(parameter.shape, parameter.stride(), dtype=value.dtype, device=value.device)
    return copy.copy_(value)


def lay_out_state(entries: Mapping[Any, Any]) -> None:
    """Lay out an optimizer's loaded state like its parameters.

    It may be transposed, or a view that would keep a whole tensor in memory.

    Args:
        entries: by parameter; other keys are left alone.
    """
    for parameter, own in by_parameter(entries):
        for key, value in own.items():
            if type(value) is Tensor and value.shape == parameter.shape and _is_other(value, parameter):
                own[key] = laid_out_as(parameter, value)


def _is_other(value: Tensor, parameter: Tensor) -> bool:
    return value.layout is torch.strided and (
        value.stride() != parameter.stride() or value.untyped_storage().nbytes() > value.nbytes
    )
