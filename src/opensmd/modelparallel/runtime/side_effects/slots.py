"""The enumeration of what a module holds besides parameters and children.

A slot is an attribute or buffer of one module, or an attribute of an object that modules hold: whatever a
forward or hook may set, so that microbatches, other ranks and the dry run must know about it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from torch import nn

from opensmd.modelparallel.runtime.side_effects.objects.held import Held

__all__ = ["ABSENT", "Holder", "Slot", "attributes_of", "buffers_of", "changed_slots", "slots_of"]

Holder = nn.Module | Held

ABSENT: Any = object()
# What torch and the runtime themselves keep in modules.
_MACHINERY = frozenset({*nn.Module().__dict__, "forward", "_compiled_call_impl"})


class Slot(NamedTuple):
    """One attribute or buffer of a module, or attribute of an object."""

    holder: Holder
    name: str
    is_buffer: bool = False

    @property
    def is_gone(self) -> bool:
        """Whether its object is no more."""
        return isinstance(self.holder, Held) and self.holder.is_gone

    @property
    def value(self) -> Any:
        """Return the current value; :data:`ABSENT` if there is none."""
        if isinstance(self.holder, Held):
            return self.holder.values.get(self.name, ABSENT)
        return _values(self.holder, self.is_buffer).get(self.name, ABSENT)

    def put(self, value: Any) -> None:
        """Set ``value``, or remove it for :data:`ABSENT`, without triggering anything."""
        if isinstance(self.holder, Held):
            _put(self.holder, self.name, value)
            return
        values = _values(self.holder, self.is_buffer)
        if value is ABSENT:
            values.pop(self.name, None)
        else:
            # Bypasses watched buffers: swapping the state of microbatches is not an action of the program.
            dict.__setitem__(values, self.name, value)

    def path(self, names: Mapping[nn.Module, str]) -> str:
        """Return its name in the model, for messages."""
        holder = self.holder.path if isinstance(self.holder, Held) else names[self.holder]
        return f"{holder}.{self.name}".lstrip(".")


def attributes_of(holder: Holder) -> Mapping[str, Any]:
    """Return the attributes that it has now; perhaps the dict in which they are."""
    return holder.values if isinstance(holder, Held) else holder.__dict__


def buffers_of(holder: Holder) -> dict[str, Any]:
    """Return a module's own buffers in a new dict; empty for a scripted one, which keeps its own."""
    buffers = None if isinstance(holder, Held) else holder._buffers
    # A plain dict of watched buffers, without triggering reads.
    return dict.copy(buffers) if buffers and isinstance(buffers, dict) else {}


def slots_of(holder: Holder) -> Iterator[tuple[Slot, Any]]:
    """Yield the holder's own slots with their values."""
    for name, value in attributes_of(holder).items():
        if name not in _MACHINERY or isinstance(holder, Held):
            yield Slot(holder, name), value
    for name, value in buffers_of(holder).items():
        yield Slot(holder, name, is_buffer=True), value


def changed_slots(
    holder: Holder, attributes: Mapping[str, Any], buffers: Mapping[str, Any]
) -> Iterator[tuple[Slot, Any]]:
    """Yield the holder's own slots that held other objects before, with their values.

    Args:
        holder: which one.
        attributes, buffers: its :func:`attributes_of` and :func:`buffers_of` of before.
    """
    for name, value in attributes_of(holder).items():
        if value is not attributes.get(name, ABSENT) and (name not in _MACHINERY or isinstance(holder, Held)):
            yield Slot(holder, name), value
    for name, value in buffers_of(holder).items():
        if value is not buffers.get(name, ABSENT):
            yield Slot(holder, name, is_buffer=True), value


def _values(module: nn.Module, buffers: bool) -> dict[str, Any]:
    return module._buffers if buffers else module.__dict__


def _put(holder: Held, name: str, value: Any) -> None:
    if value is ABSENT:
        holder.remove(name)
    else:
        holder.put(name, value)
