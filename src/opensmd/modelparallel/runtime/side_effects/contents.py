"""Lists and dicts in attributes of modules, which forwards fill and clear: one content for each microbatch.

Auxiliary losses are collected so. The container stays the same object, as several modules may hold it; what
is in it changes with the turns. A microbatch begins with what the last one that is through its forward has
left. Of one that is not, nobody knows yet what it will leave: most clear what they have filled, so it counts
as if it left what it has found. Only numbers in a dict, which are counters, go on from what is there. At the
step's end there is what plain PyTorch would leave, as far as that can be known: everything in order where all
have only added something, else what the last one has left.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

from torch import Tensor, nn

from opensmd.modelparallel.runtime.side_effects.containers import (
    Content,
    added,
    containers_in,
    content_of,
    is_container,
    joined,
    same_content,
    set_content,
)
from opensmd.modelparallel.runtime.side_effects.slots import Slot, slots_of
from opensmd.modelparallel.runtime.tensors import structure
from opensmd.modelparallel.runtime.tensors.tags import tag_of

__all__ = ["ContainerSlots", "ContentsPerMicrobatch"]

# Whatever has more entries is a table (a vocabulary): no forward fills it, and copies would take time.
_MOST_ENTRIES = 1024
_NOTED = frozenset({int, float, str})


class ContainerSlots:
    """Where the modules of a model have containers.

    Args:
        modules: the model's.

    Attributes:
        changed: those that steps change, as far as is known.
    """

    def __init__(self, modules: Collection[nn.Module] = ()) -> None:
        self.changed: set[Slot] = set()
        self._modules = modules
        self._slots: list[Slot] = []
        self.refresh()

    def refresh(self) -> None:
        """Look for containers that have come since."""
        self._slots = [
            slot for module in self._modules for slot, value in slots_of(module) if is_container(value)
        ]

    def containers(self) -> Iterator[tuple[Slot, Any]]:
        """All containers there, and those in them."""
        for slot in self._slots:
            value = slot.value
            if is_container(value) and len(value) <= _MOST_ENTRIES:
                for container in containers_in(value):
                    yield slot, container


class ContentsPerMicrobatch:
    """What the microbatches of one step have put into containers.

    Args:
        slots: where containers are.
        begun: the microbatches that have begun; grows.
        through: those that are through their forwards; grows.
    """

    def __init__(self, slots: ContainerSlots, begun: Collection[int], through: Collection[int]) -> None:
        self._slots = slots
        self._begun, self._through = begun, through
        self._before = {
            id(container): (container, content_of(container)) for _, container in slots.containers()
        }
        self._contents: dict[int, _Contents] = {}
        for slot in slots.changed:
            for container in containers_in(slot.value):
                self._add(slot, container)

    def __bool__(self) -> bool:
        return bool(self._contents)

    def begin(self, microbatch: int) -> None:
        """A microbatch begins, or goes on after others have."""
        for contents in self._contents.values():
            contents.show(microbatch, self._through)

    def suspend(
        self,
        microbatch: int,
        require_unused: Callable[[Slot, int, list[Tensor]], None],
        *,
        look: bool,
    ) -> list[tuple[Slot, Any]]:
        """The microbatch lets others go on.

        Args:
            microbatch: which.
            require_unused: raises for a slot of which a later microbatch has used these tensors.
            look: it may have changed containers that no one has changed before.

        Returns:
            The containers that it has changed, and where they are.

        Raises:
            SMPError: it has changed what a later one has already used.
        """
        if look:
            self._look()
        changed = []
        for contents in self._contents.values():
            before = contents.keep(microbatch)
            if before is not None:
                require_unused(contents.slot, microbatch, structure.tensors_in(before))
                changed.append((contents.slot, contents.container))
        return changed

    def is_new(self, slot: Slot, value: Any, before: Any) -> None:
        """A microbatch has put this there, where it had found ``before``.

        A container in place of another was made from what there was, and is what the next one begins with
        (``self.bank = [*self.bank, new][-8:]``). Where there was none, somebody needed one to fill.
        """
        if is_container(value) and not value:
            self._slots.changed.add(slot)  # to be filled, if not in this step
        for container in containers_in(value):
            if is_container(before):
                self._before.setdefault(id(container), (container, content_of(container)))
            if slot in self._slots.changed:
                self._add(slot, container)

    def forget(self, value: Any) -> None:
        """No microbatch finds this any more."""
        for container in containers_in(value):
            self._contents.pop(id(container), None)
            self._before.pop(id(container), None)

    def end(self, until: int) -> None:
        """All microbatches before ``until`` have ended."""
        for contents in self._contents.values():
            contents.end(until)

    def end_step(self) -> None:
        """Leave what plain PyTorch would."""
        for contents in self._contents.values():
            set_content(contents.container, contents.left())

    def _look(self) -> None:
        self._slots.refresh()
        for slot, container in self._slots.containers():
            if id(container) in self._contents:
                continue
            before = self._before.get(id(container), (None, []))[1]
            now = content_of(container)
            if not same_content(before, now) and (_computed(before) or _computed(now) or _counts(now)):
                self._slots.changed.add(slot)
                self._add(slot, container)

    def _add(self, slot: Slot, container: Any) -> None:
        if id(container) not in self._contents:
            empty: Content = {} if isinstance(container, Mapping) else []
            before = self._before.get(id(container), (None, empty))[1]
            self._contents[id(container)] = _Contents(slot, container, before, self._begun)


class _Contents:
    """What one container is for each microbatch."""

    def __init__(self, slot: Slot, container: Any, before: Content, begun: Collection[int] = ()) -> None:
        self.slot = slot
        self.container = container
        self._before = before
        self._now: dict[int, Content] = {}
        self._first: dict[int, Content] = dict.fromkeys(begun, before)  # what each has begun with
        self._left = before  # by those that have ended, as far as all before them have
        self._next = 0  # to end

    def show(self, microbatch: int, through: Collection[int]) -> None:
        """Put there what the microbatch has put there, or what it is to begin with.

        That is settled once: it may have seen that nothing is there before an earlier one was through. Only
        counters go on, until it counts itself.
        """
        first = self._first.get(microbatch)
        if microbatch not in self._now and (first is None or _counts(first)):
            earlier = [
                number
                for number, now in self._now.items()
                if number < microbatch and (number in through or _counts(now))
            ]
            self._first[microbatch] = self._now[max(earlier)] if earlier else self._before
        set_content(self.container, self._of(microbatch))

    def keep(self, microbatch: int) -> Content | None:
        """Take what is there; what was there before, if something has changed."""
        before, now = self._of(microbatch), content_of(self.container)
        if same_content(before, now):
            return None
        self._now[microbatch] = now
        return before

    def end(self, until: int) -> None:
        """All microbatches before ``until`` have ended; only the last one's content may be asked for."""
        done = [number for number in sorted(self._now) if number < until]
        for microbatch in done:
            if microbatch >= self._next:
                self._left = self._after(microbatch)
        for microbatch in done[:-1]:
            del self._now[microbatch]
        self._next = max(self._next, until)

    def left(self) -> Content:
        """What there is after all of them."""
        self.end(max(self._now, default=-1) + 1)
        return self._left

    def _of(self, microbatch: int) -> Content:
        return self._now.get(microbatch, self._first.get(microbatch, self._before))

    def _after(self, microbatch: int) -> Content:
        first, now = self._first.pop(microbatch, self._before), self._now[microbatch]
        more = added(first, now)
        # Losses to be trained by, in what was empty, are for one microbatch: it would have been cleared.
        if more is None or (not first and any(map(_trains, structure.tensors_in(now)))):
            return now
        return joined(self._left, more)


def _computed(value: Any) -> list[Tensor]:
    """The tensors of a value but parameters, which all microbatches share (an LSTM lists its own anew)."""
    return [tensor for tensor in structure.tensors_in(value) if not isinstance(tensor, nn.Parameter)]


def _counts(content: Content) -> bool:
    """Whether this is a dict of numbers and texts alone."""
    return (
        isinstance(content, dict) and bool(content) and all(type(each) in _NOTED for each in content.values())
    )


def _trains(tensor: Tensor) -> bool:
    tag = tag_of(tensor)
    return tensor.requires_grad if tag is None else tag.requires_grad
