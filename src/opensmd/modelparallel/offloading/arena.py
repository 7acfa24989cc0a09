"""A file for activations: memory as large as a disk.

The file has no name, so that nothing is left behind however the process ends. It is written and read by
``pwrite`` and ``preadv``: with a mapping, a full disk would kill the process by SIGBUS, and the activations
would count as memory of the process.
"""

from __future__ import annotations

import os
import tempfile
import threading
from collections import deque

import torch
from torch import Tensor

from opensmd.modelparallel.offloading.free_space import FreeSpace

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
        self._free = FreeSpace()
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
                self._free.add(*self._given_back.popleft())
            start = self._free.take(rounded)
            return self._grow(rounded) if start is None else start

    def give_back(self, offset: int, size: int) -> None:
        """Free the room at ``offset`` again; waits for no lock, as the garbage collector may call it."""
        self._given_back.append((offset, offset + _rounded(size)))

    def _grow(self, size: int) -> int:
        """Return an offset with room at the end of the file, beginning with what is free there."""
        free = self._free.take_last(self._end)
        start = self._end if free is None else free
        self._end = start + size
        return start

    def write(self, tensor: Tensor, offset: int) -> None:
        """Write a contiguous CPU tensor.

        Raises:
            OSError: the disk is full or fails; the message names the folder.
        """
        rest = _bytes_of(tensor)
        try:
            while rest:
                written = os.pwrite(self._file.fileno(), rest, offset)
                rest, offset = rest[written:], offset + written
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
        rest = _bytes_of(tensor)
        while rest:
            count = os.preadv(self._file.fileno(), [rest], offset)
            if count == 0:
                raise OSError(f"the file of offloaded activations in {self.folder} ends at byte {offset}")
            rest, offset = rest[count:], offset + count


def _rounded(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def _bytes_of(tensor: Tensor) -> memoryview:
    return memoryview(tensor.detach().view(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]
