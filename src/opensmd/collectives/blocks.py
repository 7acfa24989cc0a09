"""Blocks of shared memory that large messages lie in, so that only their places travel.

The sender copies a message once, into a block of its heap. The receiver uses the block as it is, as the
memory of the tensor that it receives. When that tensor is gone, a word in the block says so, and the sender
fills the block again. Through a ring both sides would have to work at the same time.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

__all__ = ["BLOCK_BYTES", "Blocks"]

BLOCK_BYTES = 256 << 10  # smaller messages fit into the ring
HEADER_BYTES = 64


@dataclass
class _Block:
    memory: Tensor
    in_use: Tensor  # one int64, cleared by the receiver
    offset: int

    @property
    def room(self) -> int:
        return self.memory.numel() - HEADER_BYTES


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

    def put(self, data: Tensor) -> int | None:
        """Copy a contiguous tensor into a block; its offset in the heap, or None when the heap is full."""
        raw = data.view(-1).view(torch.uint8)
        block = self._take(raw.numel())
        if block is None:
            return None
        block.in_use.fill_(1)
        block.memory[HEADER_BYTES : HEADER_BYTES + raw.numel()].copy_(raw)
        return block.offset

    def lent(self, member: int, offset: int, size: int) -> Tensor:
        """The bytes of a message that ``member`` has put; the block is free again when they are gone."""
        lent: Tensor = self._group.lend(member, offset, size)
        return lent

    def _take(self, size: int) -> _Block | None:
        for block in self._blocks:
            if size <= block.room <= 2 * size and not block.in_use.item():
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
        block = _Block(memory, memory[:8].view(torch.int64), self._group.heap_offset(memory))
        self._blocks.append(block)
        return block
