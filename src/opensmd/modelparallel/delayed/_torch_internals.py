"""The one private part of torch that delayed parameters need.

``torch.utils.swap_tensors`` gives a tensor's object another tensor, but refuses one of which there are weak
references, as recurrent modules keep them of their weights. Here the object goes on to be the parameter, so
that they stay right.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

__all__ = ["become"]


def become(parameter: nn.Parameter, tensor: Tensor) -> None:
    """Let the parameter's object be another tensor, also on another device, which ``data`` does not take."""
    torch._C._swap_tensor_impl(parameter, nn.Parameter(tensor, parameter.requires_grad))
