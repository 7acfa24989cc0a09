"""Activations of a CUDA device in pinned host memory, copied on streams in parallel to the computation."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["InPinnedMemory", "PinnedStore"]


class PinnedStore:
    """Stores the tensors of one CUDA device in host memory.

    Args:
        device: the device.
    """

    def __init__(self, device: torch.device) -> None:
        self.out = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self.back = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def put(self, tensor: Tensor) -> InPinnedMemory:
        """Start copying the tensor to the host."""
        return InPinnedMemory(self, tensor)


class InPinnedMemory:
    """A tensor in host memory, for as long as this object is referenced."""

    def __init__(self, store: PinnedStore, tensor: Tensor) -> None:
        self._store = store
        self._device = tensor.device
        self._host = torch.empty_like(tensor, device="cpu", pin_memory=True)
        store.out.wait_stream(torch.cuda.current_stream(tensor.device))
        with torch.cuda.stream(store.out):
            self._host.copy_(tensor.detach(), non_blocking=True)
            self._written = store.out.record_event()
        tensor.record_stream(store.out)  # so that its memory is not reused before the copy is done

    def is_written(self) -> bool:
        """Whether the tensor's own memory is no longer needed."""
        return bool(self._written.query())

    def wait_until_written(self) -> None:
        """Wait until the copy is complete."""
        self._written.synchronize()

    def fetch(self) -> InFlight:
        """Start copying the tensor to the device."""
        return InFlight(self._host, self._device, self._written, self._store.back)


class InFlight:
    """A copy to the device in progress."""

    def __init__(
        self, host: Tensor, device: torch.device, written: torch.cuda.Event, stream: torch.cuda.Stream
    ) -> None:
        stream.wait_event(written)
        with torch.cuda.stream(stream):
            self._tensor = torch.empty_like(host, device=device)
            self._tensor.copy_(host, non_blocking=True)
            self._ready = stream.record_event()

    def result(self) -> Tensor:
        """Return the tensor; the current stream waits for it."""
        stream = torch.cuda.current_stream(self._tensor.device)
        stream.wait_event(self._ready)
        self._tensor.record_stream(stream)
        return self._tensor
