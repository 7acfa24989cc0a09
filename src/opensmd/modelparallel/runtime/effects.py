"""What a call leaves outside its result: state of objects it was given, attributes set on its module.

A key-value cache that a decoder layer fills, an attribute that a module keeps for its parent: ranks on which
the call does not run must see them too. The home compares before and after, and sends what has changed with
its tensors taken out; the others put placeholders in.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from opensmd.modelparallel.runtime import structure
from opensmd.modelparallel.runtime.descriptions import Left, TensorDescription

__all__ = ["Effects", "apply"]

Attributes = dict[tuple[str, str], Any]  # (submodule, attribute) -> value

_OWN = frozenset({"_parameters", "_modules", "_buffers", "training", "forward", "_compiled_call_impl"})


class Effects:
    """Watches one call at its home.

    Args:
        arguments: its args and kwargs, as this rank holds them.
        leaves: the tensors in them.
        owner: the module that runs, whose submodules' attributes are watched.
    """

    def __init__(self, arguments: Any, leaves: Sequence[Tensor], owner: Any) -> None:
        self._objects = _objects(arguments)
        self._owner = owner if isinstance(owner, nn.Module) else None
        self._held: list[Tensor] = list(leaves)
        self._before = [_dump(each, self._held) for each in self._objects]
        self._attributes = _attributes(self._owner)

    def found(self) -> tuple[bytes, list[Tensor]] | None:
        """What has changed, as pickled state and the tensors that are new; None if nothing has."""
        tensors = list(self._held)
        states: dict[int, Any] = {}
        for number, (each, before) in enumerate(zip(self._objects, self._before, strict=True)):
            if before is not None and _dump(each, list(self._held)) != before:
                states[number] = each.__dict__
        attributes = {
            place: value
            for place, value in _attributes(self._owner).items()
            if place not in self._attributes or self._attributes[place] is not value
        }
        attributes = {place: value for place, value in attributes.items() if _dump(value, []) is not None}
        if not states and not attributes:
            return None
        return structure.dump((states, attributes), tensors), tensors[len(self._held) :]


def apply(
    left: Left,
    arguments: Any,
    leaves: Sequence[Tensor],
    owner: Any,
    make: Callable[[TensorDescription], Tensor],
) -> None:
    """Do here to the same objects and modules what the call did at its home.

    Args:
        left: what the home told.
        arguments, leaves, owner: as for :class:`Effects`, on this rank.
        make: makes the placeholder of a new tensor.
    """
    objects = _objects(arguments)
    held: list[Tensor] = list(leaves)
    for each in objects:
        _dump(each, held)
    states, attributes = structure.load(left.pickled, [*held, *map(make, left.tensors)])
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


def _dump(value: Any, tensors: list[Tensor]) -> bytes | None:
    """None for what cannot be carried, and so cannot be followed."""
    count = len(tensors)
    try:
        return structure.dump(value, tensors)
    except (pickle.PicklingError, TypeError, AttributeError):
        del tensors[count:]
        return None


def _attributes(owner: nn.Module | None) -> Attributes:
    """Attributes and buffers of a module and the modules below."""
    found: Attributes = {}
    if owner is None:
        return found
    for name, module in owner.named_modules():
        places: Mapping[str, Any] = {**module.__dict__, **module._buffers}
        for attribute, value in places.items():
            if attribute not in _OWN:
                found[name, attribute] = value
    return found
