"""Buffers of modules that are run piece by piece: microbatches read and change them in their order.

Moving averages, codebooks and running norms go from one microbatch to the next. Here the next one begins
while the one before still waits for other ranks. So whoever reads a buffer that steps change waits first
until all before have been through their forwards on this rank; and as every rank waits alike, all read the
same.

    microbatch 0    h = first(x)    self.mean = 0.9 * self.mean + 0.1 * h.mean()
    microbatch 1    h = first(x)      (waits)                                      reads self.mean

A buffer that steps only read costs nothing: the first step in each mode waits at all buffers, and knows then.
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
    """The calls of the microbatch that runs."""

    microbatch: Microbatch

    def settle(self) -> None:
        """Run a backward that it has deferred."""

    def wait_for_earlier(self) -> None:
        """Let all earlier ones go through their forwards first."""


class AnyThread(Protocol):
    """Any thread, as the one that asks sees itself."""

    @property
    def run(self) -> Running | None:
        """The microbatch of the calling thread, if it runs one piece by piece."""


class StepAttributes(Protocol):
    """What each microbatch of a step has in its modules."""

    def is_set(self, slot: Slot) -> None:
        """A buffer is set anew."""


class OrderedBuffers:
    """What is known of the buffers of split modules, and the order of the step under way.

    Args:
        modules: the split modules by name.
    """

    def __init__(self, modules: dict[str, nn.Module]) -> None:
        self._names = {module: name for name, module in modules.items() if module._buffers}
        # Their addresses are what tells replicated memory, so nothing else may get them.
        self._kept = [buffer.untyped_storage() for buffer in self._present()]
        self._only_read: set[tuple[Slot, Mode]] = set()
        self._step: _OrderOfStep | None = None  # None also where nothing has an order

    def ordered(
        self, thread: AnyThread, attributes: StepAttributes, *, alone: bool
    ) -> contextlib.AbstractContextManager[None]:
        """Keep the order for one step.

        Args:
            thread: whichever calls.
            attributes: of the step.
            alone: there is one microbatch, and nothing to do.
        """
        nothing = alone or not self._names
        return contextlib.nullcontext() if nothing else self._ordered(thread, attributes)

    @contextlib.contextmanager
    def _ordered(self, thread: AnyThread, attributes: StepAttributes) -> Iterator[None]:
        self._step = step = _OrderOfStep(self._names, self._only_read, thread, attributes)
        plain = {module: module._buffers for module in self._names}
        for module, buffers in plain.items():
            # Reading an attribute cannot be hooked, but nn.Module looks buffers up in this dict.
            module.__dict__["_buffers"] = _Watched(buffers, module, step)
        try:
            yield
        finally:
            for module, buffers in plain.items():
                # Others hold the plain dict (a state dict under way): it must be the same object again.
                now = buffers_of(module)
                buffers.clear()
                buffers.update(now)
                module.__dict__["_buffers"] = buffers
            step.end()
            self._step = None

    def written(self, tensor: Tensor) -> None:
        """The running microbatch writes into ``tensor``, which may be a buffer of these."""
        if self._step is not None:
            self._step.written(tensor)

    def _present(self) -> Collection[Tensor]:
        buffers = [buffer for module in self._names for buffer in module._buffers.values()]
        return [buffer for buffer in buffers if buffer is not None and buffer.layout is torch.strided]


class _OrderOfStep:
    """Who has read which buffer in a step of several microbatches.

    Args:
        names: of the modules.
        only_read: buffers that steps have only read, in each mode; learns from this step.
        thread: whichever calls.
        attributes: of the step.
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
        self._readers: dict[Slot, int] = {}  # the last microbatch
        self._modes: set[tuple[Slot, Mode]] = set()

    def end(self) -> None:
        """Remember what the step has only read."""
        # Only what a whole step has not changed: a change in its last microbatch would come too late.
        self._only_read |= {(slot, mode) for slot, mode in self._modes if slot not in self._changed}

    def written(self, tensor: Tensor) -> None:
        """The running microbatch writes into ``tensor``, which may be one of the buffers."""
        if self._readers and (run := self._thread.run) and tensor.layout is torch.strided:
            memory = tensor.untyped_storage()._cdata
            for slot in self._readers:
                value = slot.value
                if isinstance(value, Tensor) and _memory(value) == memory:
                    self._change(slot, run)

    def read(self, slot: Slot) -> None:
        """The running microbatch is about to read a buffer."""
        run = self._thread.run
        if run is None:
            return
        mode = (slot, (slot.module.training, torch.is_grad_enabled()))
        self._modes.add(mode)
        # A deferred backward may recompute a forward that changes the buffer (checkpointing).
        if mode not in self._only_read:
            run.settle()
            run.wait_for_earlier()
        # The latest reader decides: a change by anybody before it comes too late.
        self._readers[slot] = max(run.microbatch.index, self._readers.get(slot, 0))

    def set(self, slot: Slot) -> None:
        """The running microbatch is about to set a buffer anew."""
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
            name = f"{self._names[slot.module]}.{slot.name}".lstrip(".")
            raise SMPError(
                f"microbatch {run.microbatch.index} has changed buffer {name!r} after microbatch {later} had "
                "read it, which should have found the new value. Microbatches take turns, and earlier steps "
                "only read this buffer: change it in every step from the first one on that the module trains "
                "in, or set active_microbatches to 1"
            )


class _Watched(dict[str, Any]):
    """A module's buffers during a step: ``self.mean`` and ``self.mean = ...`` are seen."""

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
