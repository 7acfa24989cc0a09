"""Where a backward starts: its roots and their gradients."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

__all__ = ["latest_first", "root_gradient", "root_pairs"]


def root_gradient(root: Tensor, given: Tensor | None, share: float = 1.0) -> Tensor:
    """Return the gradient of a root: the given one or, for a single element, 1; times ``share``.

    Raises:
        RuntimeError: as in torch, the root requires no gradient, has several elements but no given gradient,
            or one of another shape.
    """
    if not root.requires_grad:
        raise RuntimeError(
            "a tensor that backward begins at does not require grad and does not have a grad_fn: the forward "
            "ran under torch.no_grad(), or nothing that it used is trained"
        )
    if given is None:
        if root.numel() != 1:
            raise RuntimeError(
                f"grad can be implicitly created only for scalar outputs, and this one has shape "
                f"{tuple(root.shape)}: pass grad_tensors, or reduce the loss to one element"
            )
        # A microbatch's share in the batch's mean is applied here: scaling the loss would be another
        # operation.
        return torch.full_like(root, share)
    if given.shape != root.shape:
        raise RuntimeError(
            f"Mismatch in shape: a gradient has shape {tuple(given.shape)}, the tensor that backward begins "
            f"at has {tuple(root.shape)}"
        )
    return given if share == 1.0 else given * share


def latest_first(
    roots: Sequence[Tensor], gradients: Sequence[Tensor]
) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
    """Return a backward's roots, latest first, with their gradients.

    An autograd thread runs the latest ready node. But that of an accelerator starts with the first node that
    it gets, while the others are on their way.
    """
    pairs = sorted(zip(roots, gradients, strict=True), key=lambda pair: _number(pair[0]), reverse=True)
    return [root for root, _ in pairs], [gradient for _, gradient in pairs]


def _number(root: Tensor) -> float:
    """Return the position of its node in the order of creation; as in autograd, leaves come last."""
    return math.inf if root.grad_fn is None else root.grad_fn._sequence_nr()


def root_pairs(
    tensors: Tensor | Sequence[Tensor], gradients: Tensor | Sequence[Tensor | None] | None
) -> tuple[list[Tensor], list[Tensor | None]]:
    """Return the roots with their given gradients; a single gradient applies to every root.

    Raises:
        TypeError: something other than tensors was given.
        ValueError: the numbers of gradients and roots differ.
    """
    roots: list[Any] = list(tensors) if isinstance(tensors, (list, tuple)) else [tensors]
    for root in roots:
        if not isinstance(root, Tensor):
            raise TypeError(
                f"model.backward: expected a tensor or a sequence of tensors, got {type(root).__name__}"
            )
    if gradients is None or isinstance(gradients, Tensor):
        return roots, [gradients] * len(roots)
    if len(gradients) != len(roots):
        raise ValueError(
            f"model.backward: got {len(roots)} tensors and {len(gradients)} gradients; expected one each"
        )
    return roots, list(gradients)
