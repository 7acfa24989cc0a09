"""What a rank is sending through a process group: kept until sent, and remembered for charts."""

from __future__ import annotations

import time
from collections import deque

import torch.distributed as dist
from torch import Tensor

from opensmd.modelparallel.runtime.messages.message import SentTensor, sent_tensors

__all__ = ["Outbox"]

_REMEMBERED = 4096  # messages, for a chart of the latest step


class Outbox:
    """The sends of one rank, whose memory must not change until they have left."""

    def __init__(self) -> None:
        self._leaving: deque[tuple[dist.Work, Tensor]] = deque()
        self._sent: deque[tuple[int, int, int]] = deque(maxlen=_REMEMBERED)

    def __len__(self) -> int:
        return len(self._leaving)

    def add(self, work: dist.Work | None, data: Tensor) -> None:
        """Keep ``data`` until ``work`` has sent it; release what has left."""
        assert work is not None  # this rank is in the group
        # Steps that change nothing in place never flush, and would otherwise keep everything they ever sent.
        while self._leaving and self._leaving[0][0].is_completed():
            self._leaving.popleft()
        self._leaving.append((work, data))

    def note(self, target: int, tag: int) -> None:
        """Note that a tensor or gradient leaves now."""
        self._sent.append((time.perf_counter_ns(), target, tag))

    def flush(self) -> None:
        """Wait until everything has left."""
        while self._leaving:
            work, _ = self._leaving.popleft()
            work.wait()

    def sent(self) -> list[SentTensor]:
        """Return the latest sent tensors and gradients, earliest first."""
        return sent_tensors(self._sent)
