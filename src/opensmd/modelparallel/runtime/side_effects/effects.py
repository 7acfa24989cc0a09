"""What a call leaves outside its result: in objects and containers it was given, in attributes of its module.

A key-value cache that a decoder layer fills, an attribute that a module keeps for its parent: ranks on which
the call does not run must see them too. The home compares before and after, and sends what has changed with
its tensors taken out; the others put placeholders in.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from opensmd.modelparallel.runtime.calls.descriptions import Found, Left, TensorDescription
from opensmd.modelparallel.runtime.side_effects.containers import Containers
from opensmd.modelparallel.runtime.tensors import structure

__all__ = ["Effects", "apply"]

Attributes = dict[tuple[str, str], Any]  # (submodule, attribute) -> value

_OWN = frozenset({"_parameters", "_modules", "_buffers", "training", "forward", "_compiled_call_impl"})


class Effects:
    """Watches one call at its home.

    Args:
        arguments: its args and kwargs, as this rank holds them.
        leaves: the tensors in them.
        given: the args and kwargs that it really gets, with tensors of other ranks fetched.
        real: the tensors in these, in the order of ``leaves``.
        owner: the module that runs, whose submodules' attributes are watched.
    """

    def __init__(
        self, arguments: Any, leaves: Sequence[Tensor], given: Any, real: Sequence[Tensor], owner: Any
    ) -> None:
        self._arguments = arguments
        self._copied = any(one is not other for one, other in zip(arguments, given, strict=True))
        self._containers = Containers(given)
        self._real = real
        self._leaves = leaves
        self._objects = _objects(arguments)
        self._owner = owner if isinstance(owner, nn.Module) else None
        self._held: list[Tensor] = list(leaves)
        self._before = [structure.carried(each, self._held) for each in self._objects]
        self._attributes = _attributes(self._owner)

    def found(self, result: Sequence[Tensor]) -> Found | None:
        """What has changed; None if nothing has. ``result`` are the tensors that the call returns."""
        tensors = [*self._held, *result]
        states: dict[int, Any] = {}
        for number, (each, before) in enumerate(zip(self._objects, self._before, strict=True)):
            if before is not None and structure.carried(each, list(self._held)) != before:
                states[number] = each.__dict__
        attributes = {
            place: value
            for place, value in _attributes(self._owner).items()
            if place not in self._attributes or self._attributes[place] is not value
        }
        attributes = {
            place: value for place, value in attributes.items() if structure.carried(value, []) is not None
        }
        pickled = structure.dump((states, attributes), tensors) if states or attributes else b""
        count = len(self._leaves)
        seen = [*self._real, *tensors[count:]]  # containers have the fetched tensors, objects may keep them
        contents = self._containers.changed(seen)
        if not pickled and not contents:
            return None
        tensors = [*self._leaves, *seen[count:]]
        if contents and self._copied:
            Containers(self._arguments).fill(contents, tensors)
        return Found(pickled, contents, tensors[len(self._held) + len(result) :])


def apply(
    left: Left,
    arguments: Any,
    leaves: Sequence[Tensor],
    owner: Any,
    result: Sequence[Tensor],
    make: Callable[[TensorDescription], Tensor],
) -> None:
    """Do here to the same objects and modules what the call did at its home.

    Args:
        left: what the home told.
        arguments, leaves, owner: as for :class:`Effects`, on this rank.
        result: the tensors of the call's result.
        make: makes the placeholder of a new tensor.
    """
    objects = _objects(arguments)
    held: list[Tensor] = list(leaves)
    for each in objects:
        structure.carried(each, held)
    tensors = [*held, *result, *map(make, left.tensors)]
    if left.contents:
        Containers(arguments).fill(left.contents, tensors)
    if not left.pickled:
        return
    states, attributes = structure.load(left.pickled, tensors)
    for number, values in states.items():
        objects[number].__dict__.clear()
        objects[number].__dict__.update(values)
    if isinstance(owner, nn.Module):
        modules = dict(owner.named_modules())
        for (name, attribute), value in attributes.items():
            setattr(modules[name], attribute, value)


def _objects(arguments: Any) -> list[Any]:
    found: list[Any] = []
    structure.opaque_objects(arguments, found)
    return found


def _attributes(owner: nn.Module | None) -> Attributes:
    """Attributes and buffers of a module and the modules below.

    With any value: a counter must be the same on all ranks, too. What microbatches have each for themselves
    (``attributes.py``) is less, values with tensors alone: a counter goes on from one microbatch to the next.
    """
    found: Attributes = {}
    if owner is None:
        return found
    for name, module in owner.named_modules():
        places: Mapping[str, Any] = {**module.__dict__, **module._buffers}
        for attribute, value in places.items():
            if attribute not in _OWN:
                found[name, attribute] = value
    return found
