"""A file for activations: memory as large as a disk.

The file has no name, so that nothing is left behind however the process ends. It is written and read by
``pwrite`` and ``preadv``: with a mapping, a full disk would kill the process by SIGBUS, and the activations
would count as memory of the process.
"""

from __future__ import annotations

import os
import tempfile
import threading
from bisect import bisect
from collections import deque

import torch
from torch import Tensor

__all__ = ["Arena"]

_ALIGNMENT = 4096  # a page, and a block of most disks


class Arena:
    """Reusable space in a file.

    Args:
        folder: where the file is, preferably on a local NVMe disk. A folder in memory (tmpfs) saves nothing.

    Raises:
        OSError: the folder cannot be written.
    """

    def __init__(self, folder: str) -> None:
        self.folder = folder
        self._file = tempfile.TemporaryFile(dir=folder, buffering=0)  # noqa: SIM115  # open as long as this
        self._end = 0
        self._free: list[tuple[int, int]] = []  # from where to where, in order, with something taken between
        self._given_back: deque[tuple[int, int]] = deque()
        self._lock = threading.Lock()

    @property
    def bytes(self) -> int:
        """The file's size so far."""
        return self._end

    def take(self, size: int) -> int:
        """Return an offset with room for ``size`` bytes, until :meth:`give_back`."""
        rounded = _rounded(size)
        with self._lock:
            while self._given_back:
                self._join(*self._given_back.popleft())
            places = [place for place, (start, end) in enumerate(self._free) if end - start >= rounded]
            if not places:
                return self._grow(rounded)
            # The smallest that is large enough, so that batches of many lengths leave the large ones whole.
            place = min(places, key=lambda place: self._free[place][1] - self._free[place][0])
            start, end = self._free.pop(place)
            if start + rounded < end:
                self._free.insert(place, (start + rounded, end))
            return start

    def give_back(self, offset: int, size: int) -> None:
        """Free the room at ``offset`` again; waits for no lock, as the garbage collector may call it."""
        self._given_back.append((offset, offset + _rounded(size)))

    def _grow(self, size: int) -> int:
        """Return an offset with room at the end of the file."""
        start = self._free.pop()[0] if self._free and self._free[-1][1] == self._end else self._end
        self._end = start + size
        return start

    def _join(self, start: int, end: int) -> None:
        """Put free room among what is free beside it."""
        place = bisect(self._free, (start, end))
        if place < len(self._free) and self._free[place][0] == end:
            end = self._free.pop(place)[1]
        if place and self._free[place - 1][1] == start:
            place -= 1
            start = self._free.pop(place)[0]
        self._free.insert(place, (start, end))

    def write(self, tensor: Tensor, offset: int) -> None:
        """Write a contiguous CPU tensor.

        Raises:
            OSError: the disk is full or fails; the message names the folder.
        """
        left = _bytes_of(tensor)
        try:
            while left:
                written = os.pwrite(self._file.fileno(), left, offset)
                left, offset = left[written:], offset + written
        except OSError as error:
            raise OSError(
                error.errno,
                f"activations could not be offloaded into {self.folder}: {error.strerror}. Set "
                "OPENSMD_OFFLOAD_DIR to a folder with more room",
            ) from error

    def read(self, tensor: Tensor, offset: int) -> None:
        """Fill a contiguous CPU tensor.

        Raises:
            OSError: the disk fails.
        """
        left = _bytes_of(tensor)
        while left:
            count = os.preadv(self._file.fileno(), [left], offset)
            if count == 0:
                raise OSError(f"the file of offloaded activations in {self.folder} ends at byte {offset}")
            left, offset = left[count:], offset + count


def _rounded(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def _bytes_of(tensor: Tensor) -> memoryview:
    return memoryview(tensor.detach().view(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]
