"""Warning step functions that call torch's own backward, which does not average over microbatches."""

from __future__ import annotations

import warnings

from opensmd.script_level import script_level

__all__ = ["SumWarning"]


class SumWarning:
    """The warning about a model, given once.

    Args:
        is_due: whether this rank warns and ``model.backward`` averages.
    """

    def __init__(self, *, is_due: bool) -> None:
        self._is_due = is_due

    def plain_backward(self, microbatches: int) -> None:
        """Note that a step function with so many ``microbatches`` has called ``loss.backward()``.

        Warns:
            UserWarning: gradients are summed, while the script most likely wants the mean.
        """
        if self._is_due and microbatches > 1:
            warnings.warn(
                f"loss.backward() in a smp.step function adds up the gradients of the {microbatches} "
                "microbatches, where model.backward(loss) makes their mean, as of the whole batch. Call "
                "model.backward(loss)",
                stacklevel=script_level(),
            )
        # Even if it was not due: with one microbatch the sum is the mean, and later steps mean the same.
        self._is_due = False
