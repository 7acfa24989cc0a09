"""How long a rank waits for what its table has next before it starts something else that is ready; pure.

Something else takes a whole action, and delays what depends on the late message by as much. So it is worth
waiting for a message that is late by a small part of an action. A wait in vain costs its length. Waits are
paid from a credit: one in vain uses up its length, a successful one earns an action, and every step earns one
wait. So if a program does not follow its table, a rank hardly waits more than once per step.
"""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["SHARE", "Patience"]

SHARE = 1 / 16  # of an action


class Patience:
    """The waits of one rank, over all steps.

    Args:
        action: seconds of a usual action; 0 if not known yet.
    """

    def __init__(self, action: float = 0.0) -> None:
        self._action = action
        self._credit = 1.0  # actions

    @property
    def seconds(self) -> float:
        """Return how long the next wait may last; 0 before a step has been measured."""
        return self._action * SHARE if self._credit >= SHARE else 0.0

    def has_waited(self, *, came: bool) -> None:
        """Note the end of a wait, because the message ``came`` or in vain."""
        self._credit = min(1.0, self._credit + 1.0) if came else self._credit - SHARE

    def step_has_ended(self, backwards: Sequence[float]) -> None:
        """Learn from the seconds that a step's backwards have taken."""
        if backwards:
            self._action = sorted(backwards)[len(backwards) // 2]
        self._credit = min(1.0, self._credit + SHARE)
