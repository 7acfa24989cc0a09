"""Copies of tensors that are made during training, and refused if a tensor was written meanwhile.

Forward and backward only read parameters and the optimizer's state, so these can be copied at the same time::

    save_checkpoint   begins; notes each tensor's version, and a few of its elements
    a thread          copies piece by piece
    optimizer.step    copies what is left itself, waits for the piece in flight, and compares the versions
    the thread        compares the elements, and writes

torch counts writes into a tensor, except those through ``.data``, NumPy or collectives. These show in the
noted elements, some of which change when a whole tensor is written.
"""

from __future__ import annotations

import ctypes
import threading
from collections import deque
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from opensmd.modelparallel.exceptions import SMPCheckpointError
from opensmd.modelparallel.runtime.tensors.before_writing import Reader

__all__ = ["Copying", "can_be_copied_later"]

PIECE = 4 << 20  # bytes: the most that a step may have to wait for
SAMPLES = 64  # elements of each tensor
SMALL = 1 << 16  # bytes: copying less is quicker than watching it


def can_be_copied_later(tensor: Tensor) -> bool:
    """Whether writes into the tensor can be noticed, and it is large enough to be worth it."""
    return (
        tensor.layout is torch.strided
        and tensor.device.type in ("cpu", "cuda")
        and not tensor.is_inference()
        and tensor.is_contiguous()
        and tensor.numel() * tensor.element_size() > SMALL
    )


class Copying:
    """Copies in progress.

    Args:
        pairs: what is copied and where to; targets of device tensors are pinned.
        name: gives the name of a source, for errors.
    """

    def __init__(self, pairs: Sequence[tuple[Tensor, Tensor]], name: Callable[[Tensor], str]) -> None:
        self._pairs = list(pairs)
        self._name = name
        self._versions = [source._version for source, _ in self._pairs]
        self._samples = [_sample(source) for source, _ in self._pairs]
        self._pieces = deque(piece for pair in self._pairs if not pair[0].is_cuda for piece in _pieces(*pair))
        self._left = len(self._pieces)
        self._lock = threading.Lock()
        self._copied = threading.Event()
        self._event = _copy_from_devices([pair for pair in self._pairs if pair[0].is_cuda])
        self._written: list[str] = []
        self._closed = False
        if not self._left:
            self._copied.set()
        self._reader: Reader | None = Reader(self.finish) if self._pairs else None

    def finish(self) -> None:
        """Copy the rest, so that this thread may then write to the sources."""
        self._copy()
        if self._event is not None:
            torch.cuda.current_stream().wait_event(self._event)  # later computations wait, not this thread
        self._close()

    def abandon(self) -> None:
        """Stop using the buffers, whatever became of the save."""
        self._copy()
        if self._event is not None:
            self._event.synchronize()
        self._close()

    def require_untouched(self) -> None:
        """Copy the rest, and make sure that no copy contains anything newer.

        Raises:
            SMPCheckpointError: something was written before :meth:`finish`.
        """
        self._copy()
        if self._event is not None:
            self._event.synchronize()
        with self._lock:
            written = self._written if self._closed else self._with_new_versions()
        written = list(dict.fromkeys([*written, *self._with_other_elements()]))
        if written:
            more = f" and {len(written) - 3} more" if len(written) > 3 else ""
            raise SMPCheckpointError(
                f"{', '.join(written[:3])}{more} was written after smp.save_checkpoint(..., blocking=False) "
                "and before it had been copied. optimizer.step and load_state_dict wait for that; before "
                "other writes to parameters or optimizer state, call wait_until_copied() of what "
                "save_checkpoint returned"
            )

    def _close(self) -> None:
        with self._lock:
            if not self._closed:
                self._written, self._closed = self._with_new_versions(), True
        if self._reader is not None:
            self._reader.close()

    def _copy(self) -> None:
        """Copy pieces that no other thread has started, and wait for the others."""
        while True:
            try:
                target, source, size = self._pieces.popleft()
            except IndexError:
                break
            ctypes.memmove(target, source, size)  # uses this thread alone, and releases the GIL
            with self._lock:
                self._left -= 1
                if not self._left:
                    self._copied.set()
        self._copied.wait()

    def _with_new_versions(self) -> list[str]:
        found = zip(self._pairs, self._versions, strict=True)
        return [self._name(source) for (source, _), version in found if source._version != version]

    def _with_other_elements(self) -> list[str]:
        found = zip(self._pairs, self._samples, strict=True)
        return [
            self._name(source) for (source, copy), sample in found if not _are_same(_sample(copy), sample)
        ]


def _sample(tensor: Tensor) -> Tensor:
    """Return copies of evenly spread elements, from the first to the last."""
    step = max(1, (tensor.numel() - 1) // (SAMPLES - 1))
    return tensor.detach().view(-1)[::step].clone()


def _are_same(one: Tensor, other: Tensor) -> bool:
    """Compare bit by bit, so that NaN equals NaN."""
    return torch.equal(one.cpu().view(torch.uint8), other.cpu().view(torch.uint8))


def _pieces(source: Tensor, target: Tensor) -> list[tuple[int, int, int]]:
    size = source.numel() * source.element_size()
    first, into = source.data_ptr(), target.data_ptr()
    return [(into + at, first + at, min(PIECE, size - at)) for at in range(0, size, PIECE)]


def _copy_from_devices(pairs: Sequence[tuple[Tensor, Tensor]]) -> torch.cuda.Event | None:
    """Copy while the device computes; return an event that marks the end."""
    if not pairs:
        return None
    beside = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    beside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(beside):
        for source, target in pairs:
            target.copy_(source, non_blocking=True)
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(beside)
    return event
