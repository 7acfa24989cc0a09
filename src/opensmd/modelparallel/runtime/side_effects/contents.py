"""Lists and dicts in module attributes, which forwards fill and clear: separate contents per microbatch.

Auxiliary losses are collected this way. The container stays the same object, because several modules may hold
it; its content changes with the turns. A microbatch starts with what the last one with a complete forward has
left. What an unfinished one will leave is unknown; most clear what they have filled, so it counts as leaving
what it found. Only numbers in a dict, which are counters, continue from the current content. At the end of
the step, the content is what plain PyTorch would leave, as far as that can be known: all additions in order
if microbatches have only added something, else what the last one has left.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
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
from opensmd.modelparallel.runtime.side_effects.objects.reach import is_object
from opensmd.modelparallel.runtime.side_effects.slots import Holder, Slot, slots_of
from opensmd.modelparallel.runtime.side_effects.transient import Learned, are_noted
from opensmd.modelparallel.runtime.tensors import structure
from opensmd.modelparallel.runtime.tensors.tags import tag_of

__all__ = ["ContainerSlots", "ContentsPerMicrobatch"]

# Anything with more entries is a table (a vocabulary) that no forward fills, and slow to copy.
_MOST_ENTRIES = 1024


class ContainerSlots:
    """Where a model's modules have containers.

    Args:
        holders: the model's modules, and what they reach; may change.
        is_split: whether code that runs piece by piece uses a slot.

    Attributes:
        changed: those that steps are known to change.
    """

    def __init__(
        self, holders: Iterable[Holder] = (), is_split: Callable[[Slot], bool] = lambda _: False
    ) -> None:
        self.changed: set[Slot] = set()
        self.is_split = is_split
        self._holders = holders
        self._slots: list[Slot] = []
        self.refresh()

    def refresh(self) -> None:
        """Look for new containers."""
        self._slots = [
            slot for holder in self._holders for slot, value in slots_of(holder) if is_container(value)
        ]

    def containers(self) -> Iterator[tuple[Slot, Any]]:
        """Return all containers there, and those inside them."""
        for slot in self._slots:
            value = slot.value
            if is_container(value) and len(value) <= _MOST_ENTRIES:
                for container in containers_in(value):
                    yield slot, container


class ContentsPerMicrobatch:
    """What the microbatches of one step have put into containers.

    Args:
        slots: where containers are.
        begun: the microbatches that have started; grows.
        through: those with complete forwards; grows.
        learned: what is known about the forwards; grows.
    """

    def __init__(
        self,
        slots: ContainerSlots,
        begun: Collection[int],
        through: Collection[int],
        learned: Learned | None = None,
    ) -> None:
        self._slots = slots
        self._begun, self._through = begun, through
        self._learned = learned or Learned()
        present = list(slots.containers())
        self._before = {id(container): (container, content_of(container)) for _, container in present}
        self._contents: dict[int, _Contents] = {}
        for slot in (*slots.changed, *self._learned.reset):
            self.follow(slot)
        self._others = self._unknown(present)  # any step may be the first that fills one of these

    def __bool__(self) -> bool:
        return bool(self._contents)

    def any_grown(self) -> bool:
        """Whether a container that is not known to change has another length than before."""
        return any(len(container) != length for _, container, length in self._others)

    def follow(self, slot: Slot) -> None:
        """Keep the contents of what is there separate."""
        for container in containers_in(slot.value):
            self._add(slot, container)

    def begin(self, microbatch: int) -> None:
        """Start or resume a microbatch."""
        for contents in self._contents.values():
            contents.show(microbatch, self._through)

    def suspend(
        self,
        microbatch: int,
        point: int,
        require_unused: Callable[[Slot, int, list[Tensor]], None],
        *,
        look: bool,
    ) -> list[tuple[Slot, Any]]:
        """Suspend the microbatch.

        Args:
            microbatch: which one.
            point: which point of the program it has reached.
            require_unused: raises for a slot whose tensors a later microbatch has used.
            look: whether to search all containers for changes; otherwise only those of another length.

        Returns:
            The containers that it has changed, and where they are.

        Raises:
            SMPError: it has changed what a later one has already used.
        """
        if look:
            self._look()
        elif self.any_grown():
            self._look_into(self._others)
        changed = []
        for contents in self._contents.values():
            before = contents.keep(microbatch, in_split=self._slots.is_split(contents.slot))
            if before is not None:
                require_unused(contents.slot, microbatch, structure.tensors_in(before))
                self._learn(contents, microbatch, point, before)
                changed.append((contents.slot, contents.container))
        return changed

    def _learn(self, contents: _Contents, microbatch: int, point: int, shown: Content) -> None:
        """Find out whether forwards set anew what seemed to be counters."""
        now = content_of(contents.container)
        if (
            microbatch
            and are_noted(now)
            and self._learned.sets_anew(point, id(contents.container), shown, now)
        ):
            self._learned.reset.add(contents.slot)
            contents.is_transient = True

    def is_new(self, slot: Slot, value: Any, before: Any) -> None:
        """Note that a microbatch has set a new value in place of ``before``.

        One that replaces another was made from it, and is what the next microbatch starts with (``self.bank =
        [*self.bank, new][-8:]``). If there was none before, it was created to be filled.
        """
        if is_container(value) and not value:
            self._slots.changed.add(slot)  # to be filled, perhaps in a later step
        for container in containers_in(value):
            if is_container(before):
                self._before.setdefault(id(container), (container, content_of(container)))
            if slot in self._slots.changed:
                self._add(slot, container)

    def forget(self, value: Any) -> None:
        """Forget a slot that no microbatch sees any more."""
        for container in containers_in(value):
            self._contents.pop(id(container), None)
            self._before.pop(id(container), None)

    def end(self, until: int) -> None:
        """Note that all microbatches before ``until`` have ended."""
        for contents in self._contents.values():
            contents.end(until)

    def end_step(self) -> None:
        """Leave what plain PyTorch would."""
        for contents in self._contents.values():
            set_content(contents.container, contents.left())

    def _look(self) -> None:
        self._slots.refresh()
        self._look_into((slot, container, -1) for slot, container in self._slots.containers())

    def _look_into(self, candidates: Iterable[tuple[Slot, Any, int]]) -> None:
        for slot, container, length in candidates:
            if id(container) in self._contents or len(container) == length:
                continue
            before = self._before.get(id(container), (None, []))[1]
            now = content_of(container)
            if not same_content(before, now) and (_are_own(before) or _are_own(now) or are_noted(now)):
                self._slots.changed.add(slot)
                self._add(slot, container)
        self._others = self._unknown((slot, container) for slot, container, _ in self._others)

    def _unknown(self, containers: Iterable[tuple[Slot, Any]]) -> list[tuple[Slot, Any, int]]:
        """Return those that are not known to change, with their lengths."""
        return [
            (slot, container, len(container))
            for slot, container in containers
            if id(container) not in self._contents
        ]

    def _add(self, slot: Slot, container: Any) -> None:
        if id(container) not in self._contents:
            empty: Content = {} if isinstance(container, Mapping) else []
            before = self._before.get(id(container), (None, empty))[1]
            self._contents[id(container)] = _Contents(
                slot, container, before, self._begun, transient=slot in self._learned.reset
            )


class _Contents:
    """One container's content for each microbatch."""

    def __init__(
        self, slot: Slot, container: Any, before: Content, begun: Collection[int], *, transient: bool
    ) -> None:
        self.slot = slot
        self.container = container
        self.is_transient = transient
        self._before = before
        self._now: dict[int, Content] = {}
        self._first: dict[int, Content] = dict.fromkeys(begun, before)  # what each started with
        self._left = before  # left by the ended ones before the first unfinished one
        self._next = 0  # the next to end

    def show(self, microbatch: int, through: Collection[int]) -> None:
        """Show the microbatch its own content, or what it starts with.

        The latter is fixed once: it may have seen an empty container before an earlier one was complete. Only
        counters continue, until it counts itself.
        """
        first = self._first.get(microbatch)
        if microbatch not in self._now and (first is None or self._counts(first)):
            earlier = [
                number
                for number, now in self._now.items()
                if number < microbatch and (number in through or self._counts(now))
            ]
            self._first[microbatch] = self._now[max(earlier)] if earlier else self._before
        set_content(self.container, self._of(microbatch))

    def keep(self, microbatch: int, *, in_split: bool) -> Content | None:
        """Save the current content; return the previous one if something has changed."""
        before, now = self._of(microbatch), content_of(self.container)
        if same_content(before, now):
            return None
        if in_split and microbatch in self._now and self._counts(before):
            self._leave_to_later(microbatch, before)
        self._now[microbatch] = now
        return before

    def _leave_to_later(self, microbatch: int, before: Content) -> None:
        """Leave numbers that change within a forward to those that have begun; see ``attributes.py``."""
        for later in self._first:
            if later > microbatch == max([number for number in self._now if number <= later]):
                self._now[later] = before

    def end(self, until: int) -> None:
        """Note that all microbatches before ``until`` have ended; then only the last one's content counts."""
        done = [number for number in sorted(self._now) if number < until]
        for microbatch in done:
            if microbatch >= self._next:
                self._left = self._after(microbatch)
        for microbatch in done[:-1]:
            del self._now[microbatch]
        self._next = max(self._next, until)

    def left(self) -> Content:
        """Return the content after all of them."""
        self.end(max(self._now, default=-1) + 1)
        return self._left

    def _counts(self, content: Content) -> bool:
        """Whether this may be counters, which later microbatches continue."""
        return not self.is_transient and are_noted(content)

    def _of(self, microbatch: int) -> Content:
        return self._now.get(microbatch, self._first.get(microbatch, self._before))

    def _after(self, microbatch: int) -> Content:
        first, now = self._first.pop(microbatch, self._before), self._now[microbatch]
        more = added(first, now)
        # Losses in an initially empty container are for one microbatch, which would have cleared it.
        if more is None or (not first and any(map(_trains, structure.tensors_in(now)))):
            return now
        return joined(self._left, more)


def _computed(value: Any) -> list[Tensor]:
    """Return a value's tensors except parameters, which microbatches share (an LSTM relists its own)."""
    return [tensor for tensor in structure.tensors_in(value) if not isinstance(tensor, nn.Parameter)]


def _are_own(content: Content) -> bool:
    """Whether something in this may belong to one microbatch."""
    values = content.values() if isinstance(content, dict) else content
    return bool(_computed(content)) or any(map(is_object, values))


def _trains(tensor: Tensor) -> bool:
    tag = tag_of(tensor)
    return tensor.requires_grad if tag is None else tag.requires_grad
