"""Gradients of tensors that all ranks have, such as the inputs of a step.

A backward leaves in each rank's copy the gradient from the rank's own part of the model. A script that reads
the gradient (adversarial examples, saliency) means the sum. All ranks read it at the same program point, so
they exchange their shares there::

    rank 0   x.grad = share of first half  ─╮
                                            ├─ x.grad = their sum, on both
    rank 1   x.grad = share of second half ─╯

The next backward adds to what is there: to the sum on the first rank, and to nothing on the others.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from opensmd.modelparallel.exceptions import SMPUnsupportedError
from opensmd.modelparallel.runtime.tensors.tags import Tag

__all__ = ["SharedGradients"]


class SharedGradients:
    """The gradients of such tensors in one microbatch on this rank."""

    def __init__(self) -> None:
        self._whole: list[Tensor] = []  # tensors whose gradient is the sum on all ranks
        self._in_shares = self._in_whole = False  # how backwards have left gradients so far

    def before_backward(self, tags: Sequence[Tag | None], *, is_first: bool) -> None:
        """Prepare for a backward.

        Args:
            tags: those of its roots. A root that all ranks have is differentiated on all of them.
            is_first: whether this is the pipeline's first rank.
        """
        self._in_whole |= None in tags
        self._in_shares |= any(tag is not None for tag in tags)
        if not is_first:
            for tensor in self._whole:
                tensor.grad = None
        self._whole.clear()

    def is_shared(self, tensor: Tensor) -> bool:
        """Whether the ranks must add up their gradients.

        Raises:
            SMPUnsupportedError: only a part of each gradient is a share.
        """
        if not self._in_shares or not tensor.requires_grad or any(whole is tensor for whole in self._whole):
            return False
        if self._in_whole:
            raise SMPUnsupportedError(
                f"the gradient of a tensor of shape {tuple(tensor.shape)} that all pipeline ranks have was "
                "asked for after two backwards, one from a tensor of the model and one from a tensor that "
                "does not depend on it: nobody can tell what of it the ranks are to add up. Call backward "
                "once, on the sum of both"
            )
        return True

    def put(self, tensor: Tensor, shares: Sequence[Tensor | None]) -> None:
        """Set the gradient of ``tensor`` to the sum of all ranks' shares."""
        total: Tensor | None = None
        for share in shares:  # in the order of the ranks, so that all get the same bits
            if share is not None:
                total = share.clone() if total is None else total + share
        tensor.grad = None if total is None else total.to(tensor.device)
        self._whole.append(tensor)

    def release(self) -> None:
        """Release the tensors."""
        self._whole.clear()
