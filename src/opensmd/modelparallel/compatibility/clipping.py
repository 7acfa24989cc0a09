"""A word to scripts that clip the norm of a split model's gradients with torch's own function.

``torch.nn.utils.clip_grad_norm_`` finds no gradients at parameters of other ranks and takes the norm of one
partition, so that every partition is scaled by a factor of its own. Parameters that live elsewhere are told
when somebody reads their gradient, and look who does.
"""

from __future__ import annotations

import sys
import warnings

from opensmd.modelparallel.compatibility.quirks import reader_of_gradient

__all__ = ["ClippingWarning"]


class ClippingWarning:
    """Said once of a placed model; its parameters of other ranks share one of these.

    Args:
        stages: how many have parameters; with one, the norm of its gradients is that of all.
    """

    def __init__(self, stages: int) -> None:
        self._is_due = stages > 1

    def gradient_was_read(self) -> None:
        """Warn if the caller's caller is torch's function."""
        # Five levels to the script, with the function under no_grad that torch makes of its own.
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
