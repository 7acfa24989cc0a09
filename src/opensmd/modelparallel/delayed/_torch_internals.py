"""The private parts of torch that delayed parameters need.

``torch.utils.swap_tensors`` replaces the tensor behind an object, but refuses objects with weak references,
which recurrent modules keep to their weights. Here the object remains the parameter, so the references stay
valid.
"""

from __future__ import annotations

from contextlib import AbstractContextManager

import torch
from torch import Tensor, nn
from torch.utils import _python_dispatch

__all__ = ["become", "without_modes"]


def become(parameter: nn.Parameter, tensor: Tensor) -> None:
    """Replace the tensor behind the parameter's object, even by one on another device, unlike ``data``."""
    torch._C._swap_tensor_impl(parameter, nn.Parameter(tensor, parameter.requires_grad))


def without_modes() -> AbstractContextManager[object]:
    """Hide operations inside from all dispatch modes."""
    return _python_dispatch._disable_current_modes()
