"""Tensors of a parameter in the order of its memory.

torch's fused optimizers go through the memory of a parameter, its gradient and its state alike, without
asking for strides: of tensors that lie in another order they pair the wrong elements, without a word.
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from typing import Any

import torch
from torch import Tensor

__all__ = ["lay_out_state", "laid_out_as"]


def laid_out_as(parameter: Tensor, come: Tensor) -> Tensor:
    """A copy of what has come, with the parameter's strides."""
    made = torch.empty_strided(parameter.shape, parameter.stride(), dtype=come.dtype, device=come.device)
    return made.copy_(come)


def lay_out_state(entries: Mapping[Any, Any]) -> None:
    """Lay out what an optimizer has loaded for each element of its parameters.

    It may be turned, or a view of a whole tensor, of which it would keep all in memory.

    Args:
        entries: by parameter; what an optimizer keeps under other keys stays.
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
