"""What every forward sets and resets, such as a cache that it computes where there is none, and empties.

Halfway through a forward, such a cache looks like a table that the first forward makes for all. A later
microbatch must find the table, but not the cache; only the forward's end tells which it is. So the first
microbatch of a step function in each mode completes its forward before others begin, and is watched wherever
it might be suspended::

    microbatch 0    self.cache = ...    (may be suspended)    self.cache = None
    microbatch 1    begins with None, whatever unfinished ones have set

Numbers that each forward sets at its beginning (the index of a layer) look like counters, which go on from
microbatch to microbatch. Another microbatch shows which they are: it began with another number, and has the
first one's at the same point.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable, Mapping
from typing import Any

from opensmd.modelparallel.runtime.side_effects.containers import (
    Content,
    content_of,
    is_container,
    same_content,
)
from opensmd.modelparallel.runtime.side_effects.objects.held import Held
from opensmd.modelparallel.runtime.side_effects.slots import ABSENT, Holder, Slot, changed_slots

__all__ = ["FirstForward", "Learned", "are_noted", "describes_process", "is_noted"]

_NOTED = frozenset({int, float, str})
Before = Mapping[Holder, tuple[Mapping[str, Any], Mapping[str, Any]]]


class Learned:
    """What is known about the forwards of a step function in one mode.

    Attributes:
        reset: what they set and reset.
        anew: numbers in attributes that each of them sets before it uses them.
    """

    def __init__(self) -> None:
        self.reset: set[Slot] = set()
        self.anew: set[Slot] = set()
        self._before: dict[Hashable, Any] = {}
        self._at: dict[int, dict[Hashable, Any]] = {}

    def note(self, point: int, key: Hashable, before: Any, now: Any) -> None:
        """Note a number of the first microbatch at a point of the program, and at its beginning."""
        self._before[key] = before
        self._at[point][key] = now

    def sets_anew(self, point: int, key: Hashable, shown: Any, now: Any) -> bool:
        """Whether a microbatch that began with ``shown`` has the first one's number at the same point."""
        if not self._has_shown(key, shown):
            return False
        return any(self._at[near].get(key, self._before[key]) == now for near in self._near(point))

    def _has_shown(self, key: Hashable, shown: Any) -> bool:
        # Otherwise the same number says nothing.
        return key in self._before and bool(shown != self._before[key])

    def pass_point(self, point: int) -> None:
        """Note that the first microbatch comes to a point of the program."""
        self._at.setdefault(point, {})

    def _near(self, point: int) -> list[int]:
        """Return a point if the first microbatch might have been suspended there, else those around it.

        It makes new calls, which may wait elsewhere.
        """
        if point in self._at:
            return [point]
        before = [each for each in self._at if each < point]
        after = [each for each in self._at if each > point]
        return [*([max(before)] if before else []), *([min(after)] if after else [])]

    def learn(self, slot: Slot, point: int, shown: Any, now: Any) -> bool:
        """Learn from a microbatch that has changed a number; return whether all are to share it, as a sum."""
        if self.sets_anew(point, slot, shown, now):
            self.anew.add(slot)
        goes_on = self._has_shown(slot, shown) and not self.is_of_forward(slot)
        return goes_on and isinstance(slot.holder, Held) and slot.name in slot.holder.counted

    def is_of_forward(self, slot: Slot) -> bool:
        """Whether each forward resets what is there, or sets it anew."""
        return slot in self.reset or slot in self.anew

    def forget_gone(self) -> None:
        """Forget slots of objects that are no more."""
        for slots in (self.reset, self.anew):
            slots -= {slot for slot in slots if slot.is_gone}


class FirstForward:
    """Watches one microbatch up to the end of its forward.

    Args:
        learned: takes what it shows.
        before: the attributes and buffers of each module, and the attributes of each object, before it.
        containers: where there are lists and dicts, and these.
    """

    def __init__(self, learned: Learned, before: Before, containers: Iterable[tuple[Slot, Any]]) -> None:
        self._learned = learned
        self._before = before
        self._contents = [(slot, container, content_of(container)) for slot, container in containers]
        self._changed: set[Slot] = set()

    def look(self, point: int) -> Collection[Slot]:
        """Note what differs from before at a point of the program; return all that has differed."""
        for holder, (attributes, buffers) in self._before.items():
            slots = changed_slots(holder, attributes, buffers)
            self._changed.update(slot for slot, value in slots if not describes_process(slot, value))
        self._changed.update(
            slot
            for slot, container, content in self._contents
            if slot not in self._changed and not same_content(content, content_of(container))
        )
        self._note_numbers(point)
        return self._changed

    def end(self) -> None:
        """Note what has differed, and is as before again."""
        self._learned.reset |= {slot for slot in self._changed if self._is_as_before(slot)}

    def _note_numbers(self, point: int) -> None:
        self._learned.pass_point(point)
        for slot in self._changed:
            if is_noted(value := slot.value):
                self._learned.note(point, slot, self._value_before(slot), value)
        for slot, container, content in self._contents:
            if slot in self._changed and are_noted(now := content_of(container)):
                self._learned.note(point, id(container), content, now)

    def _value_before(self, slot: Slot) -> Any:
        attributes, buffers = self._before[slot.holder]
        return (buffers if slot.is_buffer else attributes).get(slot.name, ABSENT)

    def _is_as_before(self, slot: Slot) -> bool:
        before, now = self._value_before(slot), slot.value
        if not (is_container(before) and type(before) is type(now)):
            return same_content([before], [now])
        own = [(container, content) for owner, container, content in self._contents if owner == slot]
        # A new list instead of the old one may have the same in it.
        return bool(own) and all(
            same_content(content, content_of(now if container is before else container))
            for container, content in own
        )


def describes_process(slot: Slot, value: Any) -> bool:
    """Whether this is most likely about the process (calls of all instances of a class)."""
    return isinstance(slot.holder, Held) and is_noted(value) and slot.holder.describes_process(slot.name)


def is_noted(value: Any) -> bool:
    """Whether this is a number or string, or a tuple of them."""
    if isinstance(value, tuple):
        return bool(value) and all(map(is_noted, value))
    return isinstance(value, (int, float, complex, str)) and not isinstance(value, bool)


def are_noted(content: Content) -> bool:
    """Whether this is a dict of only numbers and strings."""
    return (
        isinstance(content, dict) and bool(content) and all(type(each) in _NOTED for each in content.values())
    )
