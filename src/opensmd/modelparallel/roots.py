"""The gradients that a backward begins with."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["root_gradient"]


def root_gradient(root: Tensor, given: Tensor | None, share: float = 1.0) -> Tensor:
    """The gradient of a root: the given one or, for a single element, 1; times ``share``.

    Raises:
        RuntimeError: several elements and no gradient, as torch's own.
    """
    if given is None:
        if root.numel() != 1:
            raise RuntimeError(
                f"grad can be implicitly created only for scalar outputs, and this one has shape "
                f"{tuple(root.shape)}: pass grad_tensors, or reduce the loss to one element"
            )
        return torch.full_like(root, share)
    return given if share == 1.0 else given * share
