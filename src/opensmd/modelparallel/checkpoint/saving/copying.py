"""Copies of tensors that are made while training goes on, and are refused if somebody has written meanwhile.

Forward and backward only read parameters and the optimizer's state, so these can be copied beside them::

    save_checkpoint   begins; notes each tensor's version, and a few of its elements
    a thread          copies piece by piece
    optimizer.step    copies what is left itself, waits for the piece under way, and compares the versions
    the thread        compares the elements, and writes

torch counts the writes into a tensor, but for those through ``.data``, NumPy or collectives; these are found
by the elements, of which a write of a whole tensor changes some.
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

PIECE = 4 << 20  # bytes: what a step may have to wait for
SAMPLES = 64  # elements of each tensor
SMALL = 1 << 16  # bytes: less is quicker copied than watched


def can_be_copied_later(tensor: Tensor) -> bool:
    """Whether writes into it can be noticed, and it is large enough to be worth it."""
    return (
        tensor.layout is torch.strided
        and tensor.device.type in ("cpu", "cuda")
        and not tensor.is_inference()
        and tensor.is_contiguous()
        and tensor.numel() * tensor.element_size() > SMALL
    )


class Copying:
    """Copies that are under way.

    Args:
        pairs: what is copied and where to; the buffers of what is on a device are pinned.
        name: of a source, for errors.
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
        """Copy what is left; what this thread does next may write the sources."""
        self._copy()
        if self._event is not None:
            torch.cuda.current_stream().wait_event(self._event)  # what is computed next, not this thread
        self._close()

    def abandon(self) -> None:
        """Use the buffers no more, whatever became of the save."""
        self._copy()
        if self._event is not None:
            self._event.synchronize()
        self._close()

    def require_untouched(self) -> None:
        """Copy what is left, and make sure that no copy has anything newer in it.

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
        """Copy pieces that nobody else has begun, and wait for the others."""
        while True:
            try:
                target, source, size = self._pieces.popleft()
            except IndexError:
                break
            ctypes.memmove(target, source, size)  # in this thread alone, and without the interpreter's lock
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
    """Copies of elements from the first to the last, evenly spread."""
    step = max(1, (tensor.numel() - 1) // (SAMPLES - 1))
    return tensor.detach().view(-1)[::step].clone()


def _are_same(one: Tensor, other: Tensor) -> bool:
    """Bit by bit, so that NaN is NaN."""
    return torch.equal(one.cpu().view(torch.uint8), other.cpu().view(torch.uint8))


def _pieces(source: Tensor, target: Tensor) -> list[tuple[int, int, int]]:
    size = source.numel() * source.element_size()
    first, into = source.data_ptr(), target.data_ptr()
    return [(into + at, first + at, min(PIECE, size - at)) for at in range(0, size, PIECE)]


def _copy_from_devices(pairs: Sequence[tuple[Tensor, Tensor]]) -> torch.cuda.Event | None:
    """Copy beside what the device computes; the event is reached when that is done."""
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
