"""The floor inside other benchmarks: its all-reduce as a contestant, its flags as a probe of the machine."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path

import torch

from benchmarks.harness.meeting import Stamps
from benchmarks.harness.native import build

__all__ = ["Floor"]

SOURCE = Path(__file__).with_name("floor_lib.cpp")


class Floor:
    """One rank's place in an arena at ``path`` that all ``size`` ranks of the host open."""

    def __init__(self, path: Path, rank: int, size: int) -> None:
        self._library = ctypes.CDLL(str(build(SOURCE)))
        self._library.floor_join.restype = ctypes.c_void_p
        self._rank = ctypes.c_void_p(self._library.floor_join(str(path).encode(), rank, size))
        if not self._rank.value:
            raise RuntimeError(f"no room for the floor's arena at {path}")

    def all_reduce(self, data: torch.Tensor) -> Callable[[Stamps], None]:
        """A block of all-reduces of ``data`` (float32, summed in place)."""

        def block(stamps: Stamps) -> None:
            self._library.floor_all_reduce(
                self._rank,
                ctypes.c_void_p(data.data_ptr()),
                ctypes.c_int64(data.numel()),
                ctypes.c_void_p(stamps.ctypes.data),
                len(stamps) - 1,
            )

        return block

    def flags(self, stamps: Stamps) -> None:
        """A block of flag exchanges with all other ranks."""
        self._library.floor_flags(self._rank, ctypes.c_void_p(stamps.ctypes.data), len(stamps) - 1)
