"""Warning scripts that clip the gradients of a split model with torch's own function.

``torch.nn.utils.clip_grad_norm_`` finds no gradients on parameters of other ranks and takes the norm of one
partition, so every partition would be scaled by its own factor. Parameters that live elsewhere notice when
their gradient is read, and check by whom.
"""

from __future__ import annotations

import sys
import warnings

from opensmd.modelparallel.compatibility.quirks import reader_of_gradient

__all__ = ["ClippingWarning"]


class ClippingWarning:
    """The warning of a placed model, given once; its parameters on other ranks share this object.

    Args:
        stages: how many stages have parameters; with one, the norm of its gradients is that of all.
    """

    def __init__(self, stages: int) -> None:
        self._is_due = stages > 1

    def gradient_was_read(self) -> None:
        """Warn if the caller's caller is torch's function."""
        # Five levels up to the script, including the function that torch wraps with no_grad.
        level = reader_of_gradient(sys._getframe(2), 5)
        if level is None or not self._is_due:
            return
        self._is_due = False
        warnings.warn(
            "torch.nn.utils.clip_grad_norm_ sees the gradients of this rank alone, so each partition is "
            "clipped by a norm of its own, not by that of the whole model. Call "
            "optimizer.clip_master_grads(max_norm) of the smp.DistributedOptimizer on all ranks",
            stacklevel=level,
        )
