"""What a rank is sending through a process group: kept until it has left, and remembered for a chart."""

from __future__ import annotations

import time
from collections import deque

import torch.distributed as dist
from torch import Tensor

from opensmd.modelparallel.runtime.messages.message import SentTensor, sent_tensors

__all__ = ["Outbox"]

_REMEMBERED = 4096  # messages, for a chart of the latest step


class Outbox:
    """The sends of one rank; their memory must stay as it is until they have left."""

    def __init__(self) -> None:
        self._leaving: deque[tuple[dist.Work, Tensor]] = deque()
        self._sent: deque[tuple[int, int, int]] = deque(maxlen=_REMEMBERED)

    def __len__(self) -> int:
        return len(self._leaving)

    def add(self, work: dist.Work | None, data: Tensor) -> None:
        """``work`` sends ``data``, which is kept until then; what has left is let go."""
        assert work is not None  # this rank is in the group
        # Steps that change nothing in place never flush, and would keep all that they have ever sent.
        while self._leaving and self._leaving[0][0].is_completed():
            self._leaving.popleft()
        self._leaving.append((work, data))

    def note(self, target: int, tag: int) -> None:
        """A tensor or gradient leaves now."""
        self._sent.append((time.perf_counter_ns(), target, tag))

    def flush(self) -> None:
        """Wait until everything has left."""
        while self._leaving:
            work, _ = self._leaving.popleft()
            work.wait()

    def sent(self) -> list[SentTensor]:
        """The latest tensors and gradients that have left, earliest first."""
        return sent_tensors(self._sent)
