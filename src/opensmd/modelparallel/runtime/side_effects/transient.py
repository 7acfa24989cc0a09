"""What every forward sets and resets, such as a cache that it computes where there is none, and empties.

Halfway through a forward, such a cache looks like a table that the first forward makes for all. A later
microbatch must find the table, but not the cache; only the forward's end tells which it is. So the first
microbatch of a step function in each mode completes its forward before others begin, and is watched wherever
it might be suspended::

    microbatch 0    self.cache = ...    (may be suspended)    self.cache = None
    microbatch 1    begins with None, whatever unfinished ones have set
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any

from torch import nn

from opensmd.modelparallel.runtime.side_effects.containers import content_of, is_container, same_content
from opensmd.modelparallel.runtime.side_effects.slots import ABSENT, Slot, changed_slots

__all__ = ["FirstForward", "Held"]

Held = Mapping[nn.Module, tuple[Mapping[str, Any], Mapping[str, Any]]]


class FirstForward:
    """Watches one microbatch up to the end of its forward.

    Args:
        before: the attributes and buffers of each module before it.
        containers: where there are lists and dicts, and these.
    """

    def __init__(self, before: Held, containers: Iterable[tuple[Slot, Any]]) -> None:
        self._before = before
        self._contents = [(slot, container, content_of(container)) for slot, container in containers]
        self._changed: set[Slot] = set()

    def look(self) -> Collection[Slot]:
        """Note what differs from before, and return all that has differed so far."""
        for module, (attributes, buffers) in self._before.items():
            self._changed.update(slot for slot, _ in changed_slots(module, attributes, buffers))
        self._changed.update(
            slot
            for slot, container, content in self._contents
            if slot not in self._changed and not same_content(content, content_of(container))
        )
        return self._changed

    def reset(self) -> set[Slot]:
        """Return what has differed, and is as before again."""
        return {slot for slot in self._changed if self._is_as_before(slot)}

    def _is_as_before(self, slot: Slot) -> bool:
        attributes, buffers = self._before[slot.module]
        before, now = (buffers if slot.is_buffer else attributes).get(slot.name, ABSENT), slot.value
        if not (is_container(before) and type(before) is type(now)):
            return same_content([before], [now])
        own = [(container, content) for owner, container, content in self._contents if owner == slot]
        # A new list instead of the old one may have the same in it.
        return bool(own) and all(
            same_content(content, content_of(now if container is before else container))
            for container, content in own
        )
