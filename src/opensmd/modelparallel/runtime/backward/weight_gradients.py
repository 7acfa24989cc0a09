"""Gradients of weights that a rank computes when it has nothing better to do.

Nobody waits for them before the step's end, but other ranks wait for the gradients that go back to them. So
the last microbatches of a step send those first, and what is left fills the time in which a rank would stand
idle (known from zero-bubble schedules, arXiv:2401.10241).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from torch import Tensor

from opensmd.modelparallel.runtime.turns.record import Record
from opensmd.native import core

__all__ = ["WeightGradients"]


class WeightGradients:
    """The second parts of backwards of one step.

    Args:
        record: told of what ran when.
    """

    def __init__(self, record: Record) -> None:
        self._record = record
        self._parts: deque[tuple[int, core.WeightBackward]] = deque()

    def __bool__(self) -> bool:
        return bool(self._parts)

    def split(self, microbatch: int, roots: Sequence[Tensor], gradients: Sequence[Tensor]) -> bool:
        """Run a backward up to the weights' gradients, which are left for later.

        Returns:
            Whether it has; False, and nothing has run, where no weights can wait.
        """
        part = core.split_backward(roots, gradients)
        if part is None:  # hooks, Python or shared weights in the graph would notice
            return False
        self._parts.append((microbatch, part))
        return True

    def run_one(self) -> bool:
        """Compute what is left of the earliest backward; False if nothing is left of any."""
        if not self._parts:
            return False
        microbatch, part = self._parts.popleft()
        self._record.begin(microbatch, "weights")
        part.run()
        self._record.end()
        return True

    def run_all(self) -> None:
        """Compute everything that is left."""
        while self.run_one():
            continue

    def drop(self) -> None:
        """Forget what is left, as the step has failed."""
        self._parts.clear()  # each keeps a graph and its saved tensors
