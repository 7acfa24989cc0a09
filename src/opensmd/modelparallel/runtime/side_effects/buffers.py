"""Buffers of modules that run piece by piece: microbatches read and change them in order.

Moving averages, codebooks and running norms pass from one microbatch to the next. Here the next one starts
while the previous one still waits for other ranks. So before a microbatch reads a buffer that steps change,
it waits until all earlier ones have completed their forwards on this rank. Every rank waits alike, so all
read the same.

    microbatch 0    h = first(x)    self.mean = 0.9 * self.mean + 0.1 * h.mean()
    microbatch 1    h = first(x)      (waits)                                      reads self.mean

A buffer that steps only read costs nothing: the first step in each mode waits at all buffers, and learns
which these are.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, ItemsView, Iterator, ValuesView
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn

from opensmd.modelparallel.exceptions import SMPError
from opensmd.modelparallel.runtime.side_effects.slots import Slot, buffers_of

if TYPE_CHECKING:
    from opensmd.modelparallel.runtime.microbatch import Microbatch

__all__ = ["OrderedBuffers"]

Mode = tuple[bool, bool]  # training, and with gradients


class Running(Protocol):
    """The calls of the running microbatch."""

    microbatch: Microbatch

    def settle(self) -> None:
        """Run its deferred backward."""

    def wait_for_earlier(self) -> None:
        """Let all earlier ones complete their forwards first."""


class AnyThread(Protocol):
    """The calling thread, whichever that is."""

    @property
    def run(self) -> Running | None:
        """The calling thread's microbatch, if it runs one piece by piece."""


class StepAttributes(Protocol):
    """What each microbatch of a step has in its modules."""

    def is_set(self, slot: Slot) -> None:
        """Note that a buffer is set."""


class OrderedBuffers:
    """What is known about the buffers of split modules, and the order of the current step.

    Args:
        modules: the split modules by name.
    """

    def __init__(self, modules: dict[str, nn.Module]) -> None:
        self._names = {module: name for name, module in modules.items() if module._buffers}
        # Kept alive: replicated memory is recognized by address, so nothing else may get it.
        self._kept = [buffer.untyped_storage() for buffer in self._present()]
        self._only_read: set[tuple[Slot, Mode]] = set()
        self._step: _OrderOfStep | None = None  # None also if nothing needs an order

    def ordered(
        self, thread: AnyThread, attributes: StepAttributes, *, alone: bool
    ) -> contextlib.AbstractContextManager[None]:
        """Keep the order for one step.

        Args:
            thread: the calling one.
            attributes: those of the step.
            alone: whether there is only one microbatch, and so nothing to do.
        """
        nothing = alone or not self._names
        return contextlib.nullcontext() if nothing else self._ordered(thread, attributes)

    @contextlib.contextmanager
    def _ordered(self, thread: AnyThread, attributes: StepAttributes) -> Iterator[None]:
        self._step = step = _OrderOfStep(self._names, self._only_read, thread, attributes)
        plain = {module: module._buffers for module in self._names}
        for module, buffers in plain.items():
            # Attribute reads cannot be hooked, but nn.Module looks buffers up in this dict.
            module.__dict__["_buffers"] = _Watched(buffers, module, step)
        try:
            yield
        finally:
            for module, buffers in plain.items():
                # Others may hold the plain dict (a state dict in progress), so the same object must come
                # back.
                now = buffers_of(module)
                buffers.clear()
                buffers.update(now)
                module.__dict__["_buffers"] = buffers
            step.end()
            self._step = None

    def written(self, tensor: Tensor) -> None:
        """Note that the running microbatch writes into ``tensor``, which may be one of the buffers."""
        if self._step is not None:
            self._step.written(tensor)

    def _present(self) -> Collection[Tensor]:
        buffers = [buffer for module in self._names for buffer in module._buffers.values()]
        return [buffer for buffer in buffers if buffer is not None and buffer.layout is torch.strided]


class _OrderOfStep:
    """Which microbatch has read which buffer in a step.

    Args:
        names: the modules' names.
        only_read: buffers that steps only read, in each mode; learns from this step.
        thread: the calling one.
        attributes: those of the step.
    """

    def __init__(
        self,
        names: dict[nn.Module, str],
        only_read: set[tuple[Slot, Mode]],
        thread: AnyThread,
        attributes: StepAttributes,
    ) -> None:
        self._names, self._only_read = names, only_read
        self._thread, self._attributes = thread, attributes
        self._changed: set[Slot] = set()
        self._readers: dict[Slot, int] = {}  # the latest microbatch
        self._modes: set[tuple[Slot, Mode]] = set()

    def end(self) -> None:
        """Remember what the step has only read."""
        # Only after a whole step, in which even the last microbatch has changed nothing.
        self._only_read |= {(slot, mode) for slot, mode in self._modes if slot not in self._changed}

    def written(self, tensor: Tensor) -> None:
        """Note that the running microbatch writes into ``tensor``, which may be one of the buffers."""
        if self._readers and (run := self._thread.run) and tensor.layout is torch.strided:
            memory = tensor.untyped_storage()._cdata
            for slot in self._readers:
                value = slot.value
                if isinstance(value, Tensor) and _memory(value) == memory:
                    self._change(slot, run)

    def read(self, slot: Slot) -> None:
        """Prepare for the running microbatch's read of a buffer."""
        run = self._thread.run
        if run is None:
            return
        mode = (slot, (_trains(slot), torch.is_grad_enabled()))
        self._modes.add(mode)
        # A deferred backward may recompute a forward that changes the buffer (checkpointing).
        if mode not in self._only_read:
            # A place of its own: waits at the call before are not always where this one is (attributes.py).
            run.microbatch.point = f"reading buffer {slot.path(self._names)!r}"
            run.settle()
            run.wait_for_earlier()
        # The latest reader decides: a change by any earlier microbatch comes too late.
        self._readers[slot] = max(run.microbatch.index, self._readers.get(slot, 0))

    def set(self, slot: Slot) -> None:
        """Prepare for the running microbatch's setting of a buffer."""
        run = self._thread.run
        if run is not None:
            self._change(slot, run)
            self._attributes.is_set(slot)

    def _change(self, slot: Slot, run: Running) -> None:
        self._changed.add(slot)
        # In any mode: what one mode changes, readers in the others must wait for.
        self._only_read -= {known for known in self._only_read if known[0] == slot}
        later = self._readers.get(slot, -1)
        if later > run.microbatch.index:
            raise SMPError(
                f"microbatch {run.microbatch.index} has changed buffer {slot.path(self._names)!r} after "
                f"microbatch {later} had read it, which should have found the new value. Microbatches take "
                "turns, and earlier steps only read this buffer: change it in every step from the first "
                "one on that the module trains in, or set active_microbatches to 1"
            )


class _Watched(dict[str, Any]):
    """A module's buffers during a step, which notices ``self.mean`` and ``self.mean = ...``."""

    def __init__(self, buffers: dict[str, Any], module: nn.Module, order: _OrderOfStep) -> None:
        super().__init__(buffers)
        self._module = module
        self._order = order

    def __getitem__(self, name: str) -> Any:
        if name in self:
            self._order.read(Slot(self._module, name, is_buffer=True))
        return super().__getitem__(name)

    def __setitem__(self, name: str, value: Any) -> None:
        self._order.set(Slot(self._module, name, is_buffer=True))
        super().__setitem__(name, value)

    def items(self) -> Any:
        return ItemsView(self)

    def values(self) -> Any:
        return ValuesView(self)

    def __delitem__(self, name: str) -> None:
        self._order.set(Slot(self._module, name, is_buffer=True))
        super().__delitem__(name)


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata if tensor.layout is torch.strided else 0


def _trains(slot: Slot) -> bool:
    return isinstance(slot.holder, nn.Module) and slot.holder.training
