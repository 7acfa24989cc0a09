"""What ``isend`` and ``irecv`` return: a message being written, and a receive that waits for one."""

from __future__ import annotations

import threading
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout

import torch

from opensmd.legacy.requests import Request
from opensmd.legacy.transports.wire import bytes_of, is_in_memory

__all__ = ["Receive", "Sent"]


class Receive(Request):
    """A posted receive; ``source`` None takes a message from any rank."""

    def __init__(self, tensor: torch.Tensor, source: int | None, rank: int, timeout: float) -> None:
        self.source = source
        self.sender: int | None = None
        self._rank = rank
        self._timeout = timeout
        self._tensor = tensor.detach()
        direct = tensor.device.type == "cpu" and is_in_memory(tensor)
        self._landing = self._tensor if direct else torch.empty_like(self._tensor, device="cpu").contiguous()
        self._done = threading.Event()
        self._error: str | None = None

    @property
    def landing(self) -> memoryview:
        """Return where the payload goes."""
        return bytes_of(self._landing)

    def mismatch(self, source: int, count: int, dtype: torch.dtype) -> str | None:
        """Return why a message does not fit, or None."""
        if (count, dtype) == (self._landing.numel(), self._landing.dtype):
            return None
        return (
            f"tensor sizes do not match: rank {source} sent {count} elements of {dtype}, recv on rank "
            f"{self._rank} expects {self._landing.numel()} of {self._landing.dtype}"
        )

    def succeed(self, sender: int) -> None:
        """Note that the payload has arrived."""
        self.sender = sender
        self._done.set()

    def fail(self, error: str) -> None:
        """Note that the payload will not come."""
        self._error = error
        self._done.set()

    def is_completed(self) -> bool:
        if not self._done.is_set():
            return False
        self._write_back()
        return True

    def wait(self) -> None:
        if not self._done.wait(self._timeout):
            source = "any rank" if self.source is None else f"rank {self.source}"
            raise RuntimeError(
                f"recv on rank {self._rank} from {source}: nothing came within {self._timeout:g} s; check "
                "that it sends, or raise OPENSMD_LEGACY_TIMEOUT"
            )
        if self._error is not None:
            raise RuntimeError(self._error)
        self._write_back()

    def _write_back(self) -> None:
        """Fill the tensor in the thread that uses it; the reader's has another current CUDA stream."""
        landing, self._landing = self._landing, self._tensor
        if landing is not self._tensor and self._error is None:
            self._tensor.copy_(landing)


class Sent(Request):
    """A message being written."""

    def __init__(self, writing: Future[None] | None, timeout: float) -> None:
        self._writing = writing
        self._timeout = timeout

    def is_completed(self) -> bool:
        return self._writing is None or self._writing.done()

    def wait(self) -> None:
        if self._writing is None:
            return
        try:
            self._writing.result(self._timeout)
        except FutureTimeout:
            raise RuntimeError(f"send: not taken within {self._timeout:g} s") from None
