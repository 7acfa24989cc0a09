"""What a call leaves outside its result: in argument objects and containers, and in module attributes.

Examples are a key-value cache that a decoder layer fills, or an attribute that a module keeps for its parent.
Ranks on which the call does not run must see them, too. The home compares before and after, and sends the
changes without tensors; the others insert placeholders. If the call has written into a tensor that all ranks
have (a static cache's length), they get the data. So they do of small tensors without gradient that it puts
into objects or variables outside of modules (a mask, a cache of constants), where modules of any rank find
them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from opensmd.modelparallel.exceptions import SMPError
from opensmd.modelparallel.runtime.calls.descriptions.describing import Left, version_of
from opensmd.modelparallel.runtime.calls.descriptions.description import LeftDescription, TensorDescription
from opensmd.modelparallel.runtime.side_effects.containers import (
    Containers,
    Content,
    added,
    containers_in,
    content_of,
    is_container,
    joined,
    same_content,
    set_content,
)
from opensmd.modelparallel.runtime.side_effects.objects.held import Held
from opensmd.modelparallel.runtime.side_effects.objects.places import Reached, ReachedPlace
from opensmd.modelparallel.runtime.side_effects.objects.reach import is_of_program, objects_in
from opensmd.modelparallel.runtime.side_effects.slots import Holder, Slot, slots_of
from opensmd.modelparallel.runtime.side_effects.transient import is_noted
from opensmd.modelparallel.runtime.tensors import structure
from opensmd.modelparallel.runtime.tensors.packed import can_be_packed, pack, pack_values, unpack_values
from opensmd.modelparallel.runtime.tensors.storages import lies_in
from opensmd.modelparallel.runtime.tensors.tags import tag_of

__all__ = ["Effects", "apply"]

# Of tensors that all ranks get. Classes and files hold constants, made once, which may be tables of many
# positions; objects also hold what belongs to one forward, such as keys and values.
_MOST_BYTES, _MOST_BYTES_OUTSIDE = 1 << 20, 16 << 20

Attributes = dict[tuple[ReachedPlace, str], Any]  # (module or object, attribute) -> value
Inner = tuple[ReachedPlace, str, int]  # and the number of a container in it


class _Kept(NamedTuple):
    """Something that was in a container before, by key or index."""

    key: Any


class _Filled(NamedTuple):
    """The change of a container: ``content`` was added, or replaces what was there."""

    content: Content
    is_added: bool


class Effects:
    """Watches one call at its home.

    Args:
        arguments: its args and kwargs on this rank.
        leaves: the tensors in them.
        given: the args and kwargs that it actually gets, with tensors fetched from other ranks.
        real: the tensors in ``given``, in the order of ``leaves``.
        owner: the module that runs, whose submodules' attributes and objects are watched.

    Attributes:
        counted: whether a number in an attribute, or in a dict in one, has changed; set by :meth:`found`,
            like the next.
        carries_on: whether the next call may continue from what this one has left in an attribute.
    """

    def __init__(
        self,
        arguments: Any,
        leaves: Sequence[Tensor],
        given: Any,
        real: Sequence[Tensor],
        owner: nn.Module | None,
    ) -> None:
        self._arguments = arguments
        # With fetched tensors in them, the containers are copies: the script's own must be filled, too.
        self._copied = any(one is not other for one, other in zip(arguments, given, strict=True))
        self._containers = Containers(given)
        self._own = Containers(arguments) if self._copied else self._containers
        self._real = real
        self._leaves = leaves
        self._objects = _objects(arguments)
        self._owner = owner if isinstance(owner, nn.Module) else None
        self._held: list[Tensor] = list(leaves)
        # Pickled, because an object's state may change at any depth; what cannot be pickled is ignored.
        self._before = [structure.dump_if_possible(item, self._held) for item in self._objects]
        # What the objects hold that is on all ranks, such as a counter that the call increments in place.
        self._replicated = {
            number: (tensor, version_of(tensor))
            for number, tensor in enumerate(self._held[len(leaves) :], len(leaves))
            if tag_of(tensor) is None
        }
        self._holders = [] if self._owner is None else [*Reached(self._owner).all()]
        self._attributes = _attributes(self._holders)
        self._contents = _contents(self._attributes)
        self._versions = _versions(self._holders, self._contents)
        self.counted = self.carries_on = False

    @property
    def containers(self) -> list[Any]:
        """The lists, mappings and dataclasses among the call's actual arguments."""
        return self._containers.containers

    @property
    def own_containers(self) -> list[Any] | None:
        """This rank's own counterparts of these; None if they are the same."""
        return self._own.containers if self._copied else None

    def found(self, result: Sequence[Tensor]) -> Left | None:
        """Return what has changed; None if nothing has. ``result`` are the tensors that the call returns."""
        tensors = [*self._held, *result]
        states: dict[int, Any] = {}
        for number, (item, before) in enumerate(zip(self._objects, self._before, strict=True)):
            # A separate list: what is new in the object must not shift the numbers of what follows.
            if before is not None and structure.dump_if_possible(item, list(self._held)) != before:
                states[number] = item.__dict__
        now = _attributes(self._holders)
        attributes = {
            place: value
            for place, value in now.items()
            if place not in self._attributes
            or self._attributes[place] is not value
            or (self._versions and self._is_written(value))
        }
        # What is counted outside of modules mostly describes the process, and no call depends on it.
        self.counted = any(
            _is_another(self._attributes.get(place), value)
            for place, value in attributes.items()
            if not place[0].is_outside
        )
        self.carries_on = torch.is_grad_enabled() and any(map(_may_carry_on, attributes.values()))
        # A file, a lock or a lambda stays here: no tensor can come out of it through attributes.
        spread: set[int] = set()  # ids of tensors that modules on any rank may find
        attributes = {
            place: value
            for place, value in attributes.items()
            if _goes_elsewhere(place[0], value, value, spread)
        }
        filled = {
            place: more
            for place, more in self._filled()
            if _goes_elsewhere(place[0], more.content, more, spread)
        }
        written = {
            number: pack_values(tensor)
            for number, (tensor, before) in self._replicated.items()
            if version_of(tensor) != before
        }
        # Even pickling nothing costs as much as the rest of this method, in every watched call.
        anything = states or attributes or filled or written
        pickled = structure.dump((states, attributes, filled, written), tensors) if anything else b""
        count = len(self._leaves)
        seen = [*self._real, *tensors[count:]]  # containers have fetched tensors, objects may keep them
        contents = self._containers.changed(seen)
        if not pickled and not contents:
            return None
        tensors = [*self._leaves, *seen[count:]]
        # With placeholders, as on the other ranks: fetched tensors are gone after the call.
        if contents and self._copied:
            self._own.fill(contents, tensors)
        new = tensors[len(self._held) + len(result) :]
        return Left(pickled, contents, new, self._data(new, spread, result))

    def _data(
        self, new: Sequence[Tensor], spread: Collection[int], result: Sequence[Tensor]
    ) -> dict[int, bytes]:
        """Return the data of those new tensors that all ranks are to have, by number."""
        if not spread:
            return {}
        # What has memory in common with others must go on changing with them.
        parameters = () if self._owner is None else (*self._owner.parameters(), *self._owner.buffers())
        memory = structure.memory_of([*self._real, *result, *parameters])
        return {
            number: pack(each)
            for number, each in enumerate(new)
            if id(each) in spread and not lies_in(each, memory)
        }

    def _is_written(self, value: Any) -> bool:
        """Whether this is a tensor that all ranks have in an object, and that the call has written into."""
        return id(value) in self._versions and version_of(value) != self._versions[id(value)]

    def _filled(self) -> Iterator[tuple[Inner, _Filled]]:
        """Return the containers in attributes whose content has changed, and how."""
        for place, (container, before) in self._contents.items():
            now = content_of(container)
            written = {id(value) for _, value in _items(now) if self._versions and self._is_written(value)}
            if written or not same_content(before, now):
                if isinstance(before, dict) and isinstance(now, dict) and not place[0].is_outside:
                    self.counted |= any(_is_another(before.get(key), value) for key, value in now.items())
                more = None if written else added(before, now)
                content = _announced(before, now, written) if more is None else more
                yield place, _Filled(content, more is not None)


def apply(
    left: LeftDescription,
    arguments: Any,
    leaves: Sequence[Tensor],
    owner: nn.Module | None,
    result: Sequence[Tensor],
    make: Callable[[TensorDescription, bytes | None], Tensor],
) -> None:
    """Apply to this rank's objects and modules what the call did at its home.

    Args:
        left: what the home has announced.
        arguments, leaves, owner: as for :class:`Effects`, on this rank.
        result: the tensors of the call's result.
        make: creates a new tensor with its data, or a placeholder.
    """
    objects = _objects(arguments)
    held: list[Tensor] = list(leaves)
    # Dumped only for the numbering, which must be the home's.
    for item in objects:
        structure.dump_if_possible(item, held)
    created = [make(described, left.data.get(number)) for number, described in enumerate(left.tensors)]
    tensors = [*held, *result, *created]
    if left.contents:
        Containers(arguments).fill(left.contents, tensors)
    if not left.pickled:
        return
    states, attributes, filled, written = structure.load(left.pickled, tensors)
    for number, packed in written.items():
        unpack_values(packed, tensors[number])
    for number, values in states.items():
        _set_attributes(vars(objects[number]), values)
    if isinstance(owner, nn.Module):
        reached = Reached(owner)
        for (place, attribute, number), announced in filled.items():
            container = containers_in(Slot(reached.at(place), attribute).value)[number]
            before = content_of(container)
            # Additions are appended to this rank's content, which may differ (a rank's own log).
            new = joined(before, announced.content) if announced.is_added else _new(before, announced.content)
            set_content(container, new)
        for (place, attribute), value in attributes.items():
            _set(reached.at(place), attribute, value)


def _set_attributes(attributes: dict[str, Any], values: dict[str, Any]) -> None:
    """Set all attributes of an object; lists and dicts stay the same ones, as at home."""
    for name in [name for name in attributes if name not in values]:
        del attributes[name]
    for name, value in values.items():
        before = attributes.get(name)
        if is_container(before) and type(before) is type(value):
            set_content(before, content_of(value))
        else:
            attributes[name] = value


def _set(holder: Holder, attribute: str, value: Any) -> None:
    if isinstance(holder, Held):
        holder.put(attribute, value)
    else:
        setattr(holder, attribute, value)


def _objects(arguments: Any) -> list[Any]:
    objects: list[Any] = []
    structure.opaque_objects(arguments, objects)
    return objects


def _attributes(holders: Iterable[tuple[ReachedPlace, Holder]]) -> Attributes:
    """Return attributes and buffers of modules and objects.

    Of any value, because counters must also be the same on all ranks.
    """
    return {(place, slot.name): value for place, holder in holders for slot, value in slots_of(holder)}


def _goes_elsewhere(place: ReachedPlace, value: Any, announced: Any, spread: set[int]) -> bool:
    """Whether other ranks may have what a call has left at a place, as ``announced``.

    Adds to ``spread`` the ids of small tensors in it, if it is in an object or outside of modules.
    """
    if (place.path or place.is_outside) and not is_of_program(value):
        return False
    # A number outside of modules mostly describes the process (calls counted in a class).
    if place.is_outside and not place.path and is_noted(value):
        return False
    tensors: list[Tensor] = []
    if structure.dump_if_possible(announced, tensors) is None:
        return False
    if tensors and (place.path or place.is_outside or objects_in(value)):
        spread.update(id(each) for each in tensors if _can_be_spread(each, place))
    return True


def _is_another(before: Any, now: Any) -> bool:
    """Whether these are two different numbers; flags, which mark something done for good, do not count."""
    both = (before, now)
    return (
        all(isinstance(each, (int, float)) and not isinstance(each, bool) for each in both) and before != now
    )


def _may_carry_on(value: Any) -> bool:
    """Whether the next call may continue from this: a running mean or memory bank, but not a loss."""
    tensors = structure.tensors_in(value)
    return bool(tensors) and not any(each.requires_grad for each in tensors)


def _contents(attributes: Attributes) -> dict[Inner, tuple[Any, Content]]:
    """Return the lists and dicts in attributes with their contents, each once."""
    found: dict[Inner, tuple[Any, Content]] = {}
    seen: set[int] = set()
    for (place, attribute), value in attributes.items():
        for number, container in enumerate(containers_in(value)):
            if id(container) not in seen:
                seen.add(id(container))
                found[place, attribute, number] = (container, content_of(container))
    return found


def _versions(
    holders: Iterable[tuple[ReachedPlace, Holder]], contents: Mapping[Inner, tuple[Any, Content]]
) -> dict[int, int]:
    """Return how often small tensors that all ranks have in objects, or outside of modules, were changed."""
    values = [
        (place, value)
        for place, holder in holders
        if isinstance(holder, Held)  # most are modules
        for value in holder.values.values()
    ]
    for (place, _, _), (_, content) in contents.items():
        if place.is_outside or place.path:
            values += [(place, value) for _, value in _items(content)]
    return {
        id(value): version_of(value)
        for place, value in values
        if isinstance(value, Tensor) and _can_be_spread(value, place)
    }


def _can_be_spread(tensor: Tensor, place: ReachedPlace) -> bool:
    """Whether a tensor that a call leaves at a place is for all ranks, which need its data."""
    most = _MOST_BYTES_OUTSIDE if place.is_outside and not place.path else _MOST_BYTES
    return tag_of(tensor) is None and can_be_packed(tensor, most)


def _announced(before: Content, now: Content, written: Collection[int]) -> Content:
    """Return the announcement of ``now`` for ranks that have ``before`` except what is ``written``."""
    keys = {id(value): key for key, value in _items(before) if id(value) not in written}
    new = [(key, _Kept(keys[id(value)]) if id(value) in keys else value) for key, value in _items(now)]
    return dict(new) if isinstance(now, dict) else [value for _, value in new]


def _new(before: Content, announced: Content) -> Content:
    """Return what was announced, completed by what this rank had before."""
    old = dict(_items(before))
    if any(type(value) is _Kept and value.key not in old for _, value in _items(announced)):
        raise SMPError(
            "a module of another pipeline rank has rearranged a list or dict in one of its attributes, whose "
            "content differs on this rank: fill and clear such containers only, or set the attribute "
            "anew (self.losses = [...])"
        )
    new = [(key, old[value.key] if type(value) is _Kept else value) for key, value in _items(announced)]
    return dict(new) if isinstance(announced, dict) else [value for _, value in new]


def _items(content: Content) -> Iterable[tuple[Any, Any]]:
    return content.items() if isinstance(content, dict) else enumerate(content)
