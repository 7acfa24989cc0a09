"""What a backward begins with: its roots and their gradients."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["root_gradient", "root_pairs"]


def root_gradient(root: Tensor, given: Tensor | None, share: float = 1.0) -> Tensor:
    """The gradient of a root: the given one or, for a single element, 1; times ``share``.

    Raises:
        RuntimeError: several elements and no gradient, or one of another shape, as torch's own.
    """
    if given is None:
        if root.numel() != 1:
            raise RuntimeError(
                f"grad can be implicitly created only for scalar outputs, and this one has shape "
                f"{tuple(root.shape)}: pass grad_tensors, or reduce the loss to one element"
            )
        return torch.full_like(root, share)
    if given.shape != root.shape:
        raise RuntimeError(
            f"Mismatch in shape: a gradient has shape {tuple(given.shape)}, the tensor that backward begins "
            f"at has {tuple(root.shape)}"
        )
    return given if share == 1.0 else given * share


def root_pairs(
    tensors: Tensor | Sequence[Tensor], gradients: Tensor | Sequence[Tensor | None] | None
) -> tuple[list[Tensor], list[Tensor | None]]:
    """The roots and the gradient given for each; a single gradient is that of every root."""
    roots = [tensors] if isinstance(tensors, Tensor) else list(tensors)
    if gradients is None or isinstance(gradients, Tensor):
        return roots, [gradients] * len(roots)
    return roots, list(gradients)
