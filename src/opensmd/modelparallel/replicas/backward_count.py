"""How many backwards a step has had, and which may be its last: the one that replicas reduce gradients in."""

from __future__ import annotations

__all__ = ["Backwards"]


class Backwards:
    """The backwards of one step on this rank.

    Args:
        microbatches: of the step; the last one's backwards come after all others.
    """

    def __init__(self, microbatches: int) -> None:
        self.microbatches = microbatches
        self._counts = [0] * microbatches

    def add(self, microbatch: int) -> None:
        """A backward of ``microbatch`` begins."""
        self._counts[microbatch] += 1

    @property
    def total(self) -> int:
        """The number of backwards of all microbatches."""
        return sum(self._counts)

    def may_be_last(self, microbatch: int) -> bool:
        """Whether the one that has begun may be the last of the step.

        That is the last of the last microbatch, if all have equally many, and any after it; with one
        microbatch, each.
        """
        last = len(self._counts) - 1
        return microbatch == last and (last == 0 or self._counts[last] >= self._counts[0])
