"""Counting a step's backwards to find the one that may be its last, in which replicas reduce gradients."""

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
        """Note the start of a backward of ``microbatch``."""
        self._counts[microbatch] += 1

    @property
    def total(self) -> int:
        """The number of backwards of all microbatches."""
        return sum(self._counts)

    def may_be_last(self, microbatch: int) -> bool:
        """Whether the current backward may be the last of the step.

        That is the last one of the last microbatch, if all have equally many, and any after it; with one
        microbatch, each.
        """
        last = len(self._counts) - 1
        return microbatch == last and (last == 0 or self._counts[last] >= self._counts[0])
