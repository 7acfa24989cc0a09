"""A file for activations: memory as large as a disk.

The file has no name, so that nothing is left behind however the process ends. It is written and read by
``pwrite`` and ``preadv``: with a mapping, a full disk would kill the process by SIGBUS, and the activations
would count as memory of the process.
"""

from __future__ import annotations

import os
import tempfile
import threading
from collections import defaultdict

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
        self._free: dict[int, list[int]] = defaultdict(list)
        self._lock = threading.Lock()

    @property
    def bytes(self) -> int:
        """The file's size so far."""
        return self._end

    def take(self, size: int) -> int:
        """Reserve ``size`` bytes until :meth:`give_back`, and return their offset."""
        rounded = -(-size // _ALIGNMENT) * _ALIGNMENT
        with self._lock:
            if self._free[rounded]:
                return self._free[rounded].pop()
            offset, self._end = self._end, self._end + rounded
            return offset

    def give_back(self, offset: int, size: int) -> None:
        """Free the space at ``offset``."""
        with self._lock:
            self._free[-(-size // _ALIGNMENT) * _ALIGNMENT].append(offset)

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


def _bytes_of(tensor: Tensor) -> memoryview:
    return memoryview(tensor.detach().view(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]
