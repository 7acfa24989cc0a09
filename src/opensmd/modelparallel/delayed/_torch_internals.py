"""The private parts of torch that delayed parameters need.

``torch.utils.swap_tensors`` gives a tensor's object another tensor, but refuses one of which there are weak
references, as recurrent modules keep them of their weights. Here the object goes on to be the parameter, so
that they stay right.
"""

from __future__ import annotations

from contextlib import AbstractContextManager

import torch
from torch import Tensor, nn
from torch.utils import _python_dispatch

__all__ = ["become", "without_modes"]


def become(parameter: nn.Parameter, tensor: Tensor) -> None:
    """Let the parameter's object be another tensor, also on another device, which ``data`` does not take."""
    torch._C._swap_tensor_impl(parameter, nn.Parameter(tensor, parameter.requires_grad))


def without_modes() -> AbstractContextManager[object]:
    """Operations inside are seen by no dispatch mode."""
    return _python_dispatch._disable_current_modes()
