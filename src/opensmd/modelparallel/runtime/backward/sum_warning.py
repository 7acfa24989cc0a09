"""A word to step functions that call torch's own backward: it makes no mean over the microbatches."""

from __future__ import annotations

import warnings

__all__ = ["SumWarning"]


class SumWarning:
    """Said once of a model.

    Args:
        is_due: this rank says it, and ``model.backward`` makes a mean.
    """

    def __init__(self, *, is_due: bool) -> None:
        self._is_due = is_due

    def plain_backward(self, microbatches: int) -> None:
        """A step function of so many ``microbatches`` has called ``loss.backward()``.

        Warns:
            UserWarning: gradients are added up, where the mean is what a script most likely wants.
        """
        if self._is_due and microbatches > 1:
            warnings.warn(
                f"loss.backward() in a smp.step function adds up the gradients of the {microbatches} "
                "microbatches, where model.backward(loss) makes their mean, as of the whole batch. Call "
                "model.backward(loss)",
                stacklevel=5,
            )
        # Also where it was not due: with one microbatch the sum is the mean, and later steps mean the same.
        self._is_due = False
