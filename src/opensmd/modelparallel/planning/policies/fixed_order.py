"""*Fixed order*: the same forwards and backwards in the same order on every rank, whatever arrives.

For transports that deliver messages only in order, and for the setting ``deterministic_server``.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

from opensmd.modelparallel.planning.policies.policy import Choice, Progress, Standing

__all__ = ["FixedOrder"]

_AT_BACKWARD = Progress.AT_BACKWARD  # enum members are slow to look up


class FixedOrder:
    """The same forwards and backwards in the same order on every rank; receives wait in place.

    Weight gradients follow their backward, which has already sent its gradient.

    Args:
        window: how many forwards precede the first backward; the same number on every rank.
        microbatches: of the step.
    """

    waits_in_place = True
    chunks = 1

    def __init__(self, window: int, microbatches: int) -> None:
        self._forwards = deque(range(microbatches))
        self._ahead = min(window, microbatches)

    def pick(self, standing: Standing, can_go_on: Callable[[int], bool]) -> Choice | None:
        """See :class:`Policy`; None only at the end, because microbatches wait in place."""
        if standing.weights:
            return Choice(*standing.weights[0])
        waiting = [i for i, progress in enumerate(standing.progress) if progress is _AT_BACKWARD]
        if self._forwards and (len(waiting) < self._ahead):
            return Choice(self._forwards.popleft())
        return Choice(waiting[0]) if waiting else None

    def holds(self, microbatch: int, progress: Sequence[Progress]) -> bool:
        """See :class:`Policy`; never, because the last microbatch's turn always comes last."""
        return False
