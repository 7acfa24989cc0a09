"""What a module holds beside its parameters and children: the one enumeration of it.

A slot is an attribute or a buffer of one module: whatever a forward or a hook may set anew, and microbatches,
other ranks and the dry run must therefore know of.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from torch import nn

__all__ = ["ABSENT", "Slot", "buffers_of", "slots_of"]

ABSENT: Any = object()
# What torch and the runtime keep in modules for themselves.
_MACHINERY = frozenset({*nn.Module().__dict__, "forward", "_compiled_call_impl"})


class Slot(NamedTuple):
    """One attribute or buffer of a module."""

    module: nn.Module
    name: str
    is_buffer: bool = False

    @property
    def value(self) -> Any:
        """What is there now; :data:`ABSENT` if nothing is."""
        return self._holder.get(self.name, ABSENT)

    def put(self, value: Any) -> None:
        """Put ``value`` there, or leave nothing there for :data:`ABSENT`; nobody is asked or hears of it."""
        holder = self._holder
        if value is ABSENT:
            holder.pop(self.name, None)
        else:
            # Past watched buffers: swapping the state of microbatches is nothing that the program has done.
            dict.__setitem__(holder, self.name, value)

    @property
    def _holder(self) -> dict[str, Any]:
        return self.module._buffers if self.is_buffer else self.module.__dict__


def buffers_of(module: nn.Module) -> dict[str, Any]:
    """The buffers of ``module`` itself, in a new dict; none of a scripted one, which keeps its own."""
    buffers = module._buffers
    # A plain dict of watched buffers, made without asking for each.
    return dict.copy(buffers) if isinstance(buffers, dict) else {}


def slots_of(module: nn.Module) -> Iterator[tuple[Slot, Any]]:
    """The slots of ``module`` itself, with what is in them."""
    for name, value in module.__dict__.items():
        if name not in _MACHINERY:
            yield Slot(module, name), value
    for name, value in buffers_of(module).items():
        yield Slot(module, name, is_buffer=True), value
