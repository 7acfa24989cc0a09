"""Lists and dicts in attributes of modules, which forwards fill and clear: one content for each microbatch.

Auxiliary losses are collected so. The container stays the same object, as several modules may hold it; what
is in it changes with the turns. A microbatch begins with what the last one that is through its forward has
left. Of one that is not, nobody knows yet what it will leave: most clear what they have filled, so it counts
as if it left what it has found. At the step's end there is what plain PyTorch would leave, as far as that can
be known: everything in order where all have only added something, else what the last one has left.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

from torch import Tensor, nn

from opensmd.modelparallel.runtime.side_effects.containers import (
    Content,
    added,
    content_of,
    joined,
    same_content,
    set_content,
)
from opensmd.modelparallel.runtime.side_effects.slots import Slot, slots_of
from opensmd.modelparallel.runtime.tensors import structure
from opensmd.modelparallel.runtime.tensors.tags import tag_of

__all__ = ["ContentsOfStep", "containers_in"]

_KINDS = (list, dict, OrderedDict, defaultdict, deque)


def containers_in(value: Any) -> list[Any]:
    """The lists and dicts among ``value`` and what is in it, from the outermost, each once."""
    found: dict[int, Any] = {}
    _collect(value, found)
    return list(found.values())


def _collect(value: Any, found: dict[int, Any]) -> None:
    if type(value) in _KINDS and id(value) not in found:
        found[id(value)] = value
        for inner in value.values() if isinstance(value, Mapping) else value:
            _collect(inner, found)


class ContentsOfStep:
    """What the microbatches of one step have put into containers.

    Args:
        modules: whose attributes are looked at.
        known: attributes with containers that steps change, as far as earlier steps know; more are added.
        require_unused: raises for a slot of which a later microbatch has used these tensors.
    """

    def __init__(
        self,
        modules: Collection[nn.Module],
        known: set[Slot],
        require_unused: Callable[[Slot, int, list[Tensor]], None],
    ) -> None:
        self._modules = modules
        self._known = known
        self._require_unused = require_unused
        self._before = {id(each): (each, content_of(each)) for _, each in self._all()}
        self._contents: dict[int, _Contents] = {}
        self._through: set[int] = set()  # their forwards
        for slot in known:
            for container in containers_in(slot.value):
                self._add(slot, container)

    def begin(self, microbatch: int) -> None:
        """A microbatch begins, or goes on after others have."""
        for contents in self._contents.values():
            contents.show(microbatch, self._through)

    def suspend(self, microbatch: int, *, look: bool, through: bool) -> None:
        """It lets others go on.

        Args:
            microbatch: which.
            look: it may have changed containers that no one has changed before.
            through: it is through its forward.

        Raises:
            SMPError: it has changed what a later one has already used.
        """
        if look:
            self._look()
        if through:
            self._through.add(microbatch)
        for contents in self._contents.values():
            before = contents.keep(microbatch)
            if before is not None:
                self._require_unused(contents.slot, microbatch, _tensors(before))

    def end(self, until: int) -> None:
        """All microbatches before ``until`` have ended."""
        for contents in self._contents.values():
            contents.end(until)

    def end_step(self) -> None:
        """Leave what plain PyTorch would."""
        for contents in self._contents.values():
            set_content(contents.container, contents.left())

    def _look(self) -> None:
        for slot, container in self._all():
            if id(container) in self._contents:
                continue
            before = self._before.get(id(container), (None, []))[1]
            now = content_of(container)
            if not same_content(before, now) and (_tensors(before) or _tensors(now)):
                self._known.add(slot)
                self._add(slot, container)

    def _add(self, slot: Slot, container: Any) -> None:
        if id(container) not in self._contents:
            empty: Content = {} if isinstance(container, Mapping) else []
            before = self._before.get(id(container), (None, empty))[1]
            self._contents[id(container)] = _Contents(slot, container, before)

    def _all(self) -> Iterator[tuple[Slot, Any]]:
        for module in self._modules:
            for slot, value in slots_of(module):
                if type(value) in _KINDS:
                    for container in containers_in(value):
                        yield slot, container


class _Contents:
    """What one container is for each microbatch."""

    def __init__(self, slot: Slot, container: Any, before: Content) -> None:
        self.slot = slot
        self.container = container
        self._before = before
        self._now: dict[int, Content] = {}
        self._first: dict[int, Content] = {}  # what each has begun with
        self._left = before  # by those that have ended, as far as all before them have
        self._next = 0  # to end

    def show(self, microbatch: int, through: Collection[int]) -> None:
        """Put there what the microbatch has put there, or what it is to begin with."""
        if microbatch not in self._now:
            earlier = [number for number in self._now if number < microbatch and number in through]
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
        if more is None or (not first and any(map(_trains, _tensors(now)))):
            return now
        return joined(self._left, more)


def _trains(tensor: Tensor) -> bool:
    tag = tag_of(tensor)
    return tensor.requires_grad if tag is None else tag.requires_grad


def _tensors(value: Any) -> list[Tensor]:
    found: list[Tensor] = []
    structure.collect(value, found)
    return found
