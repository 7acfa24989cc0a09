"""The enumeration of what a module holds besides parameters and children.

A slot is an attribute or buffer of one module: whatever a forward or hook may set, so that microbatches,
other ranks and the dry run must know about it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from torch import nn

__all__ = ["ABSENT", "Slot", "buffers_of", "changed_slots", "slots_of"]

ABSENT: Any = object()
# What torch and the runtime themselves keep in modules.
_MACHINERY = frozenset({*nn.Module().__dict__, "forward", "_compiled_call_impl"})


class Slot(NamedTuple):
    """One attribute or buffer of a module."""

    module: nn.Module
    name: str
    is_buffer: bool = False

    @property
    def value(self) -> Any:
        """Return the current value; :data:`ABSENT` if there is none."""
        return self._holder.get(self.name, ABSENT)

    def put(self, value: Any) -> None:
        """Set ``value``, or remove it for :data:`ABSENT`, without triggering anything."""
        holder = self._holder
        if value is ABSENT:
            holder.pop(self.name, None)
        else:
            # Bypasses watched buffers: swapping the state of microbatches is not an action of the program.
            dict.__setitem__(holder, self.name, value)

    def path(self, names: Mapping[nn.Module, str]) -> str:
        """Return its name in the model, for messages."""
        return f"{names[self.module]}.{self.name}".lstrip(".")

    @property
    def _holder(self) -> dict[str, Any]:
        return self.module._buffers if self.is_buffer else self.module.__dict__


def buffers_of(module: nn.Module) -> dict[str, Any]:
    """Return the module's own buffers in a new dict; empty for a scripted one, which keeps its own."""
    buffers = module._buffers
    # A plain dict of watched buffers, without triggering reads.
    return dict.copy(buffers) if isinstance(buffers, dict) else {}


def slots_of(module: nn.Module) -> Iterator[tuple[Slot, Any]]:
    """Yield the module's own slots with their values."""
    for name, value in module.__dict__.items():
        if name not in _MACHINERY:
            yield Slot(module, name), value
    for name, value in buffers_of(module).items():
        yield Slot(module, name, is_buffer=True), value


def changed_slots(
    module: nn.Module, attributes: Mapping[str, Any], buffers: Mapping[str, Any]
) -> Iterator[tuple[Slot, Any]]:
    """Yield the module's own slots that held other objects before, with their values.

    Args:
        module: which one.
        attributes, buffers: its ``__dict__`` and :func:`buffers_of` of before.
    """
    for name, value in module.__dict__.items():
        if value is not attributes.get(name, ABSENT) and name not in _MACHINERY:
            yield Slot(module, name), value
    for name, value in buffers_of(module).items() if module._buffers else ():
        if value is not buffers.get(name, ABSENT):
            yield Slot(module, name, is_buffer=True), value
