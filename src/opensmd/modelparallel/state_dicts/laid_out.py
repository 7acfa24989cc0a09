"""Giving a parameter's tensors its own memory layout.

torch's fused optimizers walk the memory of a parameter, its gradient and its state in step, ignoring strides.
With different layouts they silently pair the wrong elements.
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from typing import Any

import torch
from torch import Tensor

__all__ = ["lay_out_state", "laid_out_as"]


def laid_out_as(parameter: Tensor, come: Tensor) -> Tensor:
    """Return a copy of ``value`` with the parameter's strides."""
    made = torch.empty_strided(parameter.shape, parameter.stride(), dtype=come.dtype, device=come.device)
    return made.copy_(come)


def lay_out_state(entries: Mapping[Any, Any]) -> None:
    """Lay out an optimizer's loaded state like its parameters.

    It may be transposed, or a view that would keep a whole tensor in memory.

    Args:
        entries: by parameter; other keys are left alone.
    """
    for parameter, own in entries.items():
        if not isinstance(parameter, Tensor) or not isinstance(own, MutableMapping):
            continue
        for key, value in own.items():
            if type(value) is Tensor and value.shape == parameter.shape and _is_other(value, parameter):
                own[key] = laid_out_as(parameter, value)


def _is_other(value: Tensor, parameter: Tensor) -> bool:
    return value.layout is torch.strided and (
        value.stride() != parameter.stride() or value.untyped_storage().nbytes() > value.nbytes
    )
