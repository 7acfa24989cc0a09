"""How long a rank waits for what its table has next, before it begins something else that is ready. Pure.

What is ready takes a whole action, and what depends on the late message comes later by as much; so a message
that is late by a small part of an action is worth waiting for. A wait in vain costs what it took. Waits live
on credit: one in vain uses up its length, one that was worth it gives back an action, and every step gives
one wait. So where a program does not follow its table, hardly a rank waits more often than once a step.
"""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["SHARE", "Patience"]

SHARE = 1 / 16  # of an action


class Patience:
    """The waits of one rank, over all steps.

    Args:
        action: seconds of a usual one; 0 if they are not known yet.
    """

    def __init__(self, action: float = 0.0) -> None:
        self._action = action
        self._credit = 1.0  # actions

    @property
    def seconds(self) -> float:
        """How long the next wait may last; 0 before a step has been measured."""
        return self._action * SHARE if self._credit >= SHARE else 0.0

    def has_waited(self, *, came: bool) -> None:
        """A wait has ended because the message ``came``, or in vain."""
        self._credit = min(1.0, self._credit + 1.0) if came else self._credit - SHARE

    def step_has_ended(self, backwards: Sequence[float]) -> None:
        """Learn from the seconds that a step's backwards have taken."""
        if backwards:
            self._action = sorted(backwards)[len(backwards) // 2]
        self._credit = min(1.0, self._credit + SHARE)
