"""What a deferred backward finds in attributes of modules: what was there when it was requested.

Its function goes on meanwhile, and may reset what modules in activation checkpoints read when the backward
runs them again (``model.mask = None`` after ``model.backward(loss)``).
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from typing import Any, Protocol

__all__ = ["AttributesThen"]


class AnySlot(Hashable, Protocol):
    """Where a module keeps something."""

    @property
    def value(self) -> Any:
        """Return the current value."""

    def put(self, value: Any) -> None:
        """Set it, without triggering anything."""


class AttributesThen:
    """The attributes of one step's microbatches at their deferred backwards."""

    def __init__(self) -> None:
        self._then: dict[int, dict[AnySlot, Any]] = {}
        self._now: dict[int, dict[AnySlot, Any]] = {}  # those of the function, while the backward has its own

    def keep(self, microbatch: int, slots: Iterable[AnySlot]) -> None:
        """Keep what is in ``slots``, because the microbatch's backward is deferred."""
        self._then[microbatch] = {slot: slot.value for slot in slots}

    def show(self, microbatch: int) -> None:
        """Show the microbatch's backward what was kept for it."""
        if microbatch not in self._then:  # of nearly all models
            return
        now = self._now[microbatch] = {}
        for slot, value in self._then[microbatch].items():
            if slot.value is not value:
                now[slot] = slot.value
                slot.put(value)

    def hide(self, microbatch: int) -> bool:
        """Return to what the function has left; return whether the backward was shown anything.

        What hooks have set during the backward stays.
        """
        now = self._now.pop(microbatch, None)
        for slot, value in (now or {}).items():
            if slot.value is self._then[microbatch][slot]:
                slot.put(value)
        return now is not None

    def forget(self, microbatch: int) -> None:
        """Forget what was kept: the backward has ended."""
        self._then.pop(microbatch, None)
