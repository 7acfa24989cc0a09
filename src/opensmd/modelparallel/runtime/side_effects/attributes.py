"""What a model keeps in module attributes and buffers for another part of the microbatch.

Examples are losses on a mixture's routers, a weight that a hook computes before each call, or the length of
the batch's longest sequence. In plain PyTorch, one microbatch has finished before the next one writes there.
Here they take turns. So each sees what it has put there last itself, or else what the nearest earlier one
has.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn

from opensmd.modelparallel.exceptions import SMPError
from opensmd.modelparallel.runtime.backward.attributes_then import AttributesThen
from opensmd.modelparallel.runtime.microbatch import Microbatch
from opensmd.modelparallel.runtime.pipeline_context import PipelineContext
from opensmd.modelparallel.runtime.side_effects.containers import same_content
from opensmd.modelparallel.runtime.side_effects.contents import ContainerSlots, ContentsPerMicrobatch
from opensmd.modelparallel.runtime.side_effects.objects.held import Held
from opensmd.modelparallel.runtime.side_effects.objects.reach import is_object
from opensmd.modelparallel.runtime.side_effects.objects.registry import Objects
from opensmd.modelparallel.runtime.side_effects.parameters import ParametersPerMicrobatch, ReplacedParameters
from opensmd.modelparallel.runtime.side_effects.slots import (
    ABSENT,
    Holder,
    Slot,
    buffers_of,
    changed_slots,
)
from opensmd.modelparallel.runtime.side_effects.transient import (
    FirstForward,
    Learned,
    describes_process,
    is_noted,
)
from opensmd.modelparallel.runtime.tensors import structure
from opensmd.modelparallel.runtime.tensors.tags import origins_of, tags_of

__all__ = ["AttributesPerMicrobatch", "Places"]

_BEFORE = -1  # before all microbatches of the step


class Places:
    """The slots of a model's modules that steps set, besides parameters.

    Args:
        module: the model.
        split: its modules that run piece by piece. Calls of others that count keep the order of microbatches.
    """

    def __init__(self, module: nn.Module | None = None, *, split: Iterable[nn.Module] = ()) -> None:
        self.modules: dict[nn.Module, str] = {}
        if module is not None:
            self.modules = {child: name for name, child in module.named_modules()}
        self.slots: list[Slot] = []
        self.common: set[Slot] = set()  # sums of meters, which all microbatches add to
        self.parameters = ReplacedParameters(self.modules)
        self._split = frozenset(split)
        self.objects = Objects(self.modules, self._split)
        self.containers = ContainerSlots(self, self.is_split)
        self.calls = -1  # the number of new calls up to the end of the latest step
        # Where in the program, and in which mode, microbatches were suspended and searched.
        self.searched: set[Hashable] = set()
        # What forwards of a step function do, by function and mode.
        self.learned: dict[Hashable, Learned] = {}
        self._module = module

    def __iter__(self) -> Iterator[Holder]:
        """Yield what has slots."""
        yield from self.modules
        yield from self.objects

    def is_split(self, slot: Slot) -> bool:
        """Whether code that runs piece by piece uses a slot."""
        holder = slot.holder
        return holder.is_split if isinstance(holder, Held) else holder in self._split

    def forget_gone(self) -> None:
        """Forget slots of objects that are no more."""
        self.objects.forget_gone()
        self.slots = [slot for slot in self.slots if not slot.is_gone]
        self.common = {slot for slot in self.common if not slot.is_gone}
        self.containers.changed = {slot for slot in self.containers.changed if not slot.is_gone}
        for learned in self.learned.values():
            learned.forget_gone()

    @property
    def mode(self) -> tuple[bool, bool]:
        """Whether the model is training, and whether with gradients."""
        return self._module is not None and self._module.training, torch.is_grad_enabled()


class AttributesPerMicrobatch:
    """The attributes of the microbatches of one step.

    Args:
        places: where they are, as far as earlier steps have found.
        context: what the microbatches have in common.
        microbatches: those of the step; with a single one there is nothing to do.
        function: what identifies the step function.
    """

    def __init__(
        self,
        places: Places,
        context: PipelineContext,
        microbatches: Sequence[Microbatch],
        function: Hashable = None,
    ) -> None:
        alone = len(microbatches) == 1
        self._places = places
        self._context = context
        self._microbatches = microbatches
        self._mode = places.mode
        self._watches = bool(places.modules) and not alone
        if self._watches:
            places.forget_gone()
        # This visits every module in every step, and most have no buffers.
        self._initial: dict[Holder, tuple[Mapping[str, Any], Mapping[str, Any]]] = {
            module: (module.__dict__.copy(), buffers_of(module) if module._buffers else {})
            for module in (places.modules if self._watches else ())
        }
        if self._watches:
            self._initial.update({each: (dict(each.values), {}) for each in places.objects})
        self._values: dict[Slot, dict[int, Any]] = {}  # by the microbatch that has set them
        # Containers that a microbatch has started to fill: it continues with them, whatever others set.
        self._filled: dict[Slot, dict[int, Any]] = {}
        self._begun: set[int] = set()
        self._through: set[int] = set()  # those that have completed their forwards
        self._ended: set[int] = set()
        self._first = 0  # the first that has not ended
        self._then = AttributesThen()
        self._interrupted: set[int] = set()  # those that are suspended in a deferred backward
        program = (function, self._mode)
        self._first_forward: FirstForward | None = None
        self._learned = places.learned.get(program) or Learned()
        if self._watches and program not in places.learned:
            places.learned[program] = self._learned
            places.containers.refresh()
            containers = places.containers.containers()
            self._first_forward = FirstForward(self._learned, self._initial, containers)
        self._contents = ContentsPerMicrobatch(
            ContainerSlots() if alone else places.containers, self._begun, self._through, self._learned
        )
        self._parameters = ParametersPerMicrobatch(ReplacedParameters() if alone else places.parameters)
        for slot in () if alone else (*places.slots, *self._learned.reset):
            self._add(slot)
        self._swaps = self._has_any()  # most models keep nothing, and every turn comes here

    @property
    def watches_first(self) -> bool:
        """Whether the first microbatch is to complete its forward before others begin."""
        return self._first_forward is not None

    def watch_first(self) -> None:
        """Note what the first microbatch would show to others if it were suspended here."""
        if self._first_forward is not None:
            self._first_forward.look(self._microbatches[0].place[0])

    def begin(self, microbatch: int) -> None:
        """Start or resume a microbatch."""
        if microbatch not in self._begun:
            self._begun.add(microbatch)
            for slot in self._learned.anew:
                values = self._values[slot]
                values[microbatch] = _nearest(self._complete(values), microbatch)
        if self._swaps:
            for slot in self._values:
                slot.put(self._found(slot, microbatch))
            self._contents.begin(microbatch)
            self._parameters.begin(microbatch)
        if microbatch in self._interrupted:
            self._interrupted.discard(microbatch)
            self._then.show(microbatch)

    def defer(self, microbatch: int) -> None:
        """Keep what its backward is to find, which is deferred."""
        slots = [*self._values]
        if self._first_forward is not None:
            slots = [*slots, *self._first_forward.look(self._microbatches[0].place[0])]
        if slots:
            self._then.keep(microbatch, slots)

    def begin_backward(self, microbatch: int) -> None:
        """Begin a part of a deferred backward."""
        self._then.show(microbatch)

    def end_backward(self, microbatch: int, *, is_last: bool) -> None:
        """End a part of a deferred backward; ``is_last``: there is no other."""
        self._then.hide(microbatch)
        if is_last:
            self._then.forget(microbatch)

    def suspend(self, microbatch: int, *, through: bool) -> None:
        """Suspend a microbatch; ``through``: whether its forward is complete.

        Raises:
            SMPError: it has set something that a later one has already read.
        """
        if self._then.hide(microbatch):
            self._interrupted.add(microbatch)
        place = self._microbatches[microbatch].place
        look = self._watches and self._may_find((place, self._mode))
        point, _ = place
        if self._first_forward is not None:  # alone until now
            self._first_is_through(self._first_forward, point)
        ends_forward = through and microbatch not in self._through
        if through:
            self._through.add(microbatch)
        # Others must never see what functional_call has put in place of parameters.
        replaced = self._context.replacing > 0
        if not (look or replaced or self._swaps or self._contents.any_grown()):
            return
        if look:
            self._look()
        for slot, values in self._values.items():
            value, before = slot.value, self._found(slot, microbatch)
            # By identity: in-place changes concern buffers, or are the user's error.
            if value is not before:
                self._require_not_borrowed(slot, microbatch, structure.tensors_in(before))
                if microbatch in values and self._goes_on(slot, before):
                    self._leave_to_later(values, microbatch, before)
                if microbatch and is_noted(value) and self._learned.learn(slot, point, before, value):
                    self._places.common.add(slot)
                values[microbatch] = value
                self._filled.get(slot, {}).pop(microbatch, None)
                self._contents.is_new(slot, value, before)
        for slot in self._places.common & self._values.keys():
            del self._values[slot]
            self._places.slots.remove(slot)
        if ends_forward:
            self._leave_counters(microbatch)
        # Passed with the call: stored, the two would form a reference cycle and wait for the collector.
        for slot, container in self._contents.suspend(
            microbatch, point, self._require_not_borrowed, look=look
        ):
            if slot.value is container:
                self._filled.setdefault(slot, {})[microbatch] = container
        self._parameters.suspend(microbatch, look=look or replaced)
        self._swaps = self._has_any()

    def end(self, microbatch: int) -> None:
        """End a microbatch; see :meth:`suspend`."""
        self.suspend(microbatch, through=True)
        self._ended.add(microbatch)
        # They may end out of order, and an open one still needs what earlier ones have left.
        while self._first in self._ended:
            self._first += 1
        if not self._swaps:
            return
        for slot, values in self._values.items():
            self._forget(slot, values)
        self._contents.end(self._first)
        self._parameters.end(microbatch)

    def is_set(self, slot: Slot) -> None:
        """Note that a slot was set."""
        if self._watches and slot not in self._values:
            self._places.slots.append(slot)
            self._add(slot)
            self._swaps = True

    def end_step(self) -> None:
        """Leave what the last microbatch has set."""
        self._places.calls = self._context.calls.new
        # Plain PyTorch would have run the highest microbatch last.
        for slot, values in self._values.items():
            slot.put(values[max(values)])
        self._contents.end_step()
        self._parameters.end_step()

    def _has_any(self) -> bool:
        return bool(self._values or self._contents or self._parameters)

    def _may_find(self, place: Hashable) -> bool:
        """Whether a search may find more than earlier ones; after the first steps, mostly not.

        New attributes come with new calls. But what is set and reset again within a microbatch can only be
        found in between, and whether microbatches are suspended there changes from step to step.
        """
        if self._context.calls.new == self._places.calls and place in self._places.searched:
            return False
        self._places.searched.add(place)
        return True

    def _look(self) -> None:
        """Find further slots."""
        for held in self._places.objects.refresh():
            self._initial[held] = ({}, {})  # a forward has created it, or put it where it is reached
        for holder, (attributes, buffers) in self._initial.items():
            for slot, value in changed_slots(holder, attributes, buffers):
                if slot not in self._values and slot not in self._places.common and _is_own(slot, value):
                    self.is_set(slot)

    def _first_is_through(self, forward: FirstForward, point: int) -> None:
        """Note what the first microbatch, alone so far, has set and reset."""
        self._first_forward = None
        forward.look(point)
        forward.end()
        for slot in self._learned.reset:
            if slot not in self._values:
                self._add(slot)
            self._contents.follow(slot)
        self._swaps = self._has_any()

    def _add(self, slot: Slot) -> None:
        self._values[slot] = {_BEFORE: self._before(slot)}

    def _before(self, slot: Slot) -> Any:
        """Return the value from the start of the step."""
        return self._initial.get(slot.holder, ({}, {}))[slot.is_buffer].get(slot.name, ABSENT)

    def _found(self, slot: Slot, microbatch: int) -> Any:
        """Return what a microbatch sees in a slot."""
        filled = self._filled.get(slot, {})
        if microbatch in filled:
            return filled[microbatch]
        values = self._values[slot]
        if slot in self._learned.reset and microbatch not in values:
            return _nearest(self._complete(values), microbatch)
        return _nearest(values, microbatch)

    def _goes_on(self, slot: Slot, value: Any) -> bool:
        """Whether this may be a counter, which later microbatches continue."""
        return is_noted(value) and self._places.is_split(slot) and not self._learned.is_of_forward(slot)

    def _complete(self, values: dict[int, Any]) -> dict[int, Any]:
        """Return the values from before the step, and of microbatches with complete forwards."""
        known = self._through | {_BEFORE}
        return {number: value for number, value in values.items() if number in known}

    def _leave_counters(self, microbatch: int) -> None:
        """Let numbers pass on to later microbatches that the end of a forward has not reset after all."""
        for slot in [slot for slot in self._learned.reset if microbatch in self._values.get(slot, {})]:
            values = self._complete(self._values[slot])
            value = values.pop(microbatch)
            if is_noted(value) and not same_content([value], [_nearest(values, microbatch)]):
                self._learned.reset.discard(slot)
                self._places.slots.append(slot)

    def _leave_to_later(self, values: dict[int, Any], microbatch: int, before: Any) -> None:
        """Leave a number that changes within a forward to those that have begun, and may have set it, too.

        Small equal numbers are one object, so nothing tells whether they have.
        """
        for later in self._begun - self._through:
            if later > microbatch and _nearest_of(values, later) == microbatch:
                values[later] = before

    def _forget(self, slot: Slot, values: dict[int, Any]) -> None:
        """Drop values of microbatches before the first unfinished one, except the last of them."""
        filled = self._filled.get(slot, {})
        for number in [number for number in filled if number < self._first]:
            del filled[number]
        for number in sorted([number for number in values if number < self._first])[:-1]:
            value = values.pop(number)
            if not any(value is each for each in (*values.values(), *filled.values())):
                self._contents.forget(value)

    def _require_not_borrowed(self, slot: Slot, microbatch: int, before: list[Tensor]) -> None:
        borrowed = self._context.borrowed
        if slot.is_buffer or borrowed.isdisjoint([*tags_of(before), *origins_of(before)]):
            return  # readers of buffers have waited for earlier ones (``buffers.py``)
        name = slot.path(self._places.modules)
        raise SMPError(
            f"microbatch {microbatch} has changed {name!r} after a later microbatch had used what was there "
            "before. Microbatches take turns, but the later one should have found the new value: keep what "
            "goes from one microbatch to the next in a buffer (register_buffer), or set active_microbatches "
            "to 1"
        )


def _nearest(values: dict[int, Any], microbatch: int) -> Any:
    """Return a microbatch's own value, or that of the nearest earlier one."""
    return values[_nearest_of(values, microbatch)]


def _nearest_of(values: dict[int, Any], microbatch: int) -> int:
    """Return the microbatch itself if it has a value, or the nearest earlier one that has."""
    if microbatch in values:
        return microbatch
    return max([number for number in values if number < microbatch])


def _is_own(slot: Slot, value: Any) -> bool:
    """Whether a value belongs to one microbatch: it has or may soon have tensors, or is noted for later.

    So do functions, which may replace others for a while, as PEFT does for generating. Values that mark
    something done once for all (a flag, a handle) belong to all. Objects may be filled.
    """
    if isinstance(value, FunctionType | MethodType) or (isinstance(value, (list, dict)) and not value):
        return True
    if is_noted(value):
        return not describes_process(slot, value)
    return is_object(value) or bool(structure.tensors_in(value))
