"""The floor inside other benchmarks: its collectives as contestants, its flags as a probe of the machine."""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Callable
from pathlib import Path

import torch

from benchmarks.harness.meeting import Stamps
from benchmarks.harness.native import build

__all__ = ["Floor"]

SOURCE = Path(__file__).with_name("floor_lib.cpp")
NOTHING = torch.empty(0)


class Floor:
    """One rank's place in an arena at ``path`` that all ``size`` ranks of the host open."""

    def __init__(self, path: Path, rank: int, size: int) -> None:
        self._library = ctypes.CDLL(str(build(SOURCE)))
        self._library.floor_join.restype = ctypes.c_void_p
        self._path, self._rank, self._size = path, rank, size
        self._place = ctypes.c_void_p(self._library.floor_join(str(path).encode(), rank, size))
        if not self._place.value:
            raise RuntimeError(f"no room for the floor's arena at {path}")

    def loop(
        self, letter: str, source: torch.Tensor, target: torch.Tensor, count: int
    ) -> Callable[[Stamps], None]:
        """A block of calls of one collective on float32 tensors, ``letter`` being one of mpi_loop.c's.

        ``count`` is the number of floats of the whole message. All but all_reduce are for two ranks.
        """

        def block(stamps: Stamps) -> None:
            self._library.floor_loop(
                self._place,
                ctypes.c_char(letter.encode()),
                ctypes.c_void_p(source.data_ptr()),
                ctypes.c_void_p(target.data_ptr()),
                ctypes.c_int64(count),
                ctypes.c_void_p(stamps.ctypes.data),
                len(stamps) - 1,
            )

        return block

    def in_shared_memory(self, count: int) -> list[torch.Tensor]:
        """Every rank's tensor of ``count`` floats, for :meth:`zero_copy`; the same memory in all ranks."""
        path = self._path.with_name(f"{self._path.name}-tensors")
        stride = -(-4 * count // mmap.PAGESIZE) * mmap.PAGESIZE
        file = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            os.ftruncate(file, max(os.fstat(file).st_size, stride * self._size))
            memory = mmap.mmap(file, stride * self._size)
        finally:
            os.close(file)
        return [
            torch.frombuffer(memory, dtype=torch.float32, count=count, offset=r * stride)
            for r in range(self._size)
        ]

    def zero_copy(self, tensors: list[torch.Tensor]) -> Callable[[Stamps], None]:
        """A block of all-reduces of tensors :meth:`in_shared_memory`, of two ranks or more."""
        return self.loop("z", tensors[1], tensors[0], tensors[0].numel())

    def flags(self, stamps: Stamps) -> None:
        """A block of flag exchanges with all other ranks."""
        self.loop("f", NOTHING, NOTHING, 0)(stamps)
