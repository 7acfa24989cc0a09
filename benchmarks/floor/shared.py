"""The floor inside other benchmarks: its collectives as contestants, its flags and additions as probes of the
machine."""

from __future__ import annotations

import ctypes
import mmap
import os
import sysconfig
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
        built = str(build(SOURCE, f"-I{sysconfig.get_paths()['include']}"))
        self._library, self._python = ctypes.CDLL(built), ctypes.PyDLL(built)
        self._library.floor_join.restype = ctypes.c_void_p
        self._library.floor_additions.restype = ctypes.c_int64
        self._python.floor_bind.restype = ctypes.py_object
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
            what = self._arguments(letter, source, target, count)
            self._library.floor_loop(*what, ctypes.c_void_p(stamps.ctypes.data), len(stamps) - 1)

        return block

    def one(
        self, letter: str, source: torch.Tensor, target: torch.Tensor, count: int
    ) -> Callable[[], object]:
        """A single call of what :meth:`loop` repeats, as a C function whose call costs some 30 ns."""
        what = self._arguments(letter, source, target, count)
        function: Callable[[], object] = self._python.floor_bind(*what, ctypes.py_object((source, target)))
        return function

    def _arguments(
        self, letter: str, source: torch.Tensor, target: torch.Tensor, count: int
    ) -> tuple[object, ...]:
        pointers = (ctypes.c_void_p(one.data_ptr()) for one in (source, target))
        return self._place, ctypes.c_char(letter.encode()), *pointers, ctypes.c_int64(count)

    def in_shared_memory(self, count: int) -> list[torch.Tensor]:
        """Every rank's tensor of ``count`` floats, for the letter z; the same memory in all ranks."""
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

    def flags(self, stamps: Stamps) -> None:
        """A block of flag exchanges with all other ranks."""
        self.loop("f", NOTHING, NOTHING, 0)(stamps)

    def additions(self) -> int:
        """Nanoseconds of a fixed number of independent additions."""
        taken: int = self._library.floor_additions()
        return taken
