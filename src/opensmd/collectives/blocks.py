"""Blocks of shared memory that large messages lie in, so that only their places travel.

The sender copies a message once, into a block of its heap. The receiver uses the block as it is, as the
memory of the tensor that it receives. When that tensor is gone, a word in the block says so, and the sender
fills the block again. Through a ring both sides would have to work at the same time.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import Tensor

__all__ = ["BLOCK_BYTES", "Blocks"]

BLOCK_BYTES = 256 << 10  # smaller messages fit into the ring
HEADER_BYTES = 64
MAX_FORMS = 64  # of messages that a block remembers how to hold


class _Block:
    """One block of this member's heap: a word that says whether it is in use, then the message."""

    def __init__(self, memory: Tensor, offset: int) -> None:
        self.room = memory.numel() - HEADER_BYTES
        self.offset = offset
        self._memory = memory
        # Read and written without torch: with cold caches its operations on one word cost more than the copy.
        self._in_use = ctypes.c_int64.from_address(memory.data_ptr())
        self._windows: dict[tuple[torch.Size, torch.dtype], tuple[Tensor, Tensor]] = {}

    @property
    def is_free(self) -> bool:
        """Whether the receiver of the last message has done with it."""
        return self._in_use.value == 0

    def fill(self, data: Tensor) -> Tensor:
        """Copy a message in; what tells the receiver where it is, and how many bytes."""
        form = (data.shape, data.dtype)
        if form not in self._windows:
            if len(self._windows) == MAX_FORMS:
                self._windows.clear()
            raw = self._memory[HEADER_BYTES : HEADER_BYTES + data.nbytes]
            self._windows[form] = (
                raw.view(data.dtype).view(data.shape),
                torch.tensor([self.offset, data.nbytes]),
            )
        window, place = self._windows[form]
        self._in_use.value = 1
        window.copy_(data)
        return place


class Blocks:
    """One member's blocks.

    Args:
        backend: the group's smddp backend.
    """

    def __init__(self, backend: Any) -> None:
        self._backend = backend
        self._group = backend.shared_group
        self._blocks: list[_Block] = []
        self._full = False

    def put(self, data: Tensor) -> Tensor | None:
        """Copy a contiguous tensor into a block; where it lies (offset in the heap, bytes) for the receiver.

        None when the heap is full.
        """
        block = self._take(data.nbytes)
        return None if block is None else block.fill(data)

    def lent(self, member: int, offset: int, size: int) -> Tensor:
        """The bytes of a message that ``member`` has put; the block is free again when they are gone."""
        lent: Tensor = self._group.lend(member, offset, size)
        return lent

    def _take(self, size: int) -> _Block | None:
        for block in self._blocks:
            if size <= block.room <= 2 * size and block.is_free:
                return block
        return self._allocate(size)

    def _allocate(self, size: int) -> _Block | None:
        if self._full:
            return None
        memory = self._backend.allocate_tensor(
            HEADER_BYTES + size, dtype=torch.uint8, device=torch.device("cpu")
        )
        if not self._group.heap_contains(memory):
            self._full = True
            return None
        block = _Block(memory, self._group.heap_offset(memory))
        self._blocks.append(block)
        return block
