"""What the candidates of several benchmarks share: names, tensors in shared memory, a check of results."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
import torch.distributed as dist

from benchmarks.harness.meeting import Meeting, Stamps
from benchmarks.harness.rank import Rank
from benchmarks.harness.sampling import Candidate

__all__ = [
    "after_a_call",
    "checked",
    "in_arena",
    "one_after_the_other",
    "summing",
    "through_torch",
    "title",
]


def title(backend: str) -> str:
    """What a backend is called in tables."""
    return "do-nothing" if backend == "fake" else backend


def after_a_call(floor: str) -> str:
    """What a floor is called in tables when torch's do-nothing backend is called before it."""
    return f"{floor} through torch"


def in_arena(group: dist.ProcessGroup, like: torch.Tensor) -> torch.Tensor | None:
    """Zeros in the group's shared memory, as many as ``like`` has; None if the group has no such memory."""
    device = torch.device("cpu")
    backend = group._get_backend(device)
    if not backend.supports_tensor_alloc(device):
        return None
    return backend.allocate_tensor(like.numel(), dtype=like.dtype, device=device).zero_()


def one_after_the_other(first: Callable[[], object], second: Callable[[], object]) -> Callable[[], object]:
    """A call of both."""

    def both() -> None:
        first()
        second()

    return both


def checked(
    name: str,
    meeting: Meeting,
    block: Callable[[Stamps], None],
    fill: Callable[[], None],
    verify: Callable[[], bool],
) -> Candidate:
    """A candidate that must first show a right result: ``fill``, one call, ``verify``."""

    def check() -> None:
        fill()
        meeting.wait()
        block(np.empty(2, dtype=np.int64))
        meeting.wait()
        if not verify():
            raise RuntimeError(f"{name} gave a wrong result on rank {meeting.rank}")

    return Candidate(name, block, check)


def through_torch(data: torch.Tensor, group: dist.ProcessGroup) -> Callable[[], object]:
    """``dist.all_reduce`` on a group, as a user calls it."""
    return lambda: dist.all_reduce(data, group=group)


def summing(me: Rank, name: str, data: torch.Tensor, block: Callable[[Stamps], None]) -> Candidate:
    """A candidate that must first show a right sum. Measured are sums of zeros, which cannot overflow."""

    def numbers() -> torch.Tensor:
        """Small enough for exact sums in every dtype."""
        return torch.arange(data.numel(), dtype=torch.float32).remainder_(30)

    def fill() -> None:
        data.copy_(numbers().add_(me.rank))

    def verify() -> bool:
        right = torch.equal(data.float(), numbers().mul_(me.size).add_(sum(range(me.size))))
        data.zero_()
        return right

    return checked(name, me.meeting, block, fill, verify)
