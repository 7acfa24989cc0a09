"""The collectives that ``smd bench`` measures: the call, the expected result, and the bytes on the bus.

The size of a case is that of the whole message: what is broadcast, reduced, gathered, scattered or exchanged.
Bus bandwidth is counted as in nccl-tests, so that collectives can be compared: the bytes per second that the
slowest connection must carry at least.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist

__all__ = ["OPERATIONS", "Buffers", "Group", "Operation"]

Group = dist.ProcessGroup | None


class Buffers:
    """A source and a target of ``count`` float32 elements each, of which every rank owns a part."""

    def __init__(self, count: int, rank: int, size: int) -> None:
        self.count, self.rank, self.size = count, rank, size
        self.source, self.target = self.of_rank(rank), torch.zeros(count)

    def of_rank(self, rank: int) -> torch.Tensor:
        """Return a rank's initial numbers, which are so small that their sums are exact."""
        return torch.arange(self.count, dtype=torch.float32) % 1000 + rank

    def reset(self) -> None:
        """Restore the state before any call; in-place calls find their input in the target."""
        self.source.copy_(self.of_rank(self.rank))
        self.target.copy_(self.source)

    def part(self, tensor: torch.Tensor, rank: int | None = None) -> torch.Tensor:
        """Return the part of a rank (default: this one)."""
        return tensor.view(self.size, -1)[self.rank if rank is None else rank]

    def sum(self) -> torch.Tensor:
        """Return the sum of all ranks' sources."""
        return self.size * self.of_rank(0) + sum(range(self.size))


@dataclass(frozen=True)
class Operation:
    """One collective.

    Attributes:
        call: runs the collective on a group.
        expected: what ``result`` must contain afterwards; None on ranks that get nothing.
        result: where the result is; by default, the whole target.
        share: the share of the message that crosses the bus, by the number of ranks.
    """

    call: Callable[[Buffers, Group], object]
    expected: Callable[[Buffers], torch.Tensor | None]
    share: Callable[[int], float]
    result: Callable[[Buffers], torch.Tensor] = lambda buffers: buffers.target

    @property
    def in_parts(self) -> bool:
        """Whether every rank has a part of the message, which is then that many times larger."""
        return self.share is _all_but_own

    def wrong(self, buffers: Buffers) -> int:
        """Count the wrong elements of the result."""
        expected = self.expected(buffers)
        return 0 if expected is None else int((self.result(buffers) != expected).sum())


def _parts(buffers: Buffers, tensor: torch.Tensor) -> list[torch.Tensor]:
    return list(tensor.view(buffers.size, -1).unbind())


def _gather(buffers: Buffers, group: Group) -> None:
    parts = _parts(buffers, buffers.target) if buffers.rank == 0 else None
    dist.gather(buffers.part(buffers.source), parts, 0, group=group)


def _scatter(buffers: Buffers, group: Group) -> None:
    parts = _parts(buffers, buffers.source) if buffers.rank == 0 else None
    dist.scatter(buffers.part(buffers.target), parts, 0, group=group)


def _send_recv(buffers: Buffers, group: Group) -> None:
    """Send to the next rank and receive from the previous one, at the same time."""
    following, before = (buffers.rank + 1) % buffers.size, (buffers.rank - 1) % buffers.size
    sending = dist.isend(buffers.source, following, group=group)
    dist.recv(buffers.target, before, group=group)
    assert sending is not None
    sending.wait()


def _gathered(buffers: Buffers) -> torch.Tensor:
    return torch.cat([buffers.part(buffers.of_rank(rank), rank) for rank in range(buffers.size)])


def _exchanged(buffers: Buffers) -> torch.Tensor:
    return torch.cat([buffers.part(buffers.of_rank(rank)) for rank in range(buffers.size)])


def _all(size: int) -> float:
    return 1.0


def _all_but_own(size: int) -> float:
    return (size - 1) / size


OPERATIONS = {
    "all_reduce": Operation(
        lambda b, group: dist.all_reduce(b.target, group=group), Buffers.sum, lambda n: 2 * (n - 1) / n
    ),
    "all_gather": Operation(
        lambda b, group: dist.all_gather_single(b.target, b.part(b.source), group=group),
        _gathered,
        _all_but_own,
    ),
    "reduce_scatter": Operation(
        lambda b, group: dist.reduce_scatter_single(b.part(b.target), b.source, group=group),
        lambda b: b.part(b.sum()),
        _all_but_own,
        lambda b: b.part(b.target),
    ),
    "broadcast": Operation(
        lambda b, group: dist.broadcast(b.target, 0, group=group), lambda b: b.of_rank(0), _all
    ),
    "reduce": Operation(
        lambda b, group: dist.reduce(b.target, 0, group=group),
        lambda b: b.sum() if b.rank == 0 else None,
        _all,
    ),
    "gather": Operation(_gather, lambda b: _gathered(b) if b.rank == 0 else None, _all_but_own),
    "scatter": Operation(_scatter, lambda b: b.part(b.of_rank(0)), _all_but_own, lambda b: b.part(b.target)),
    "all_to_all": Operation(
        lambda b, group: dist.all_to_all_single(b.target, b.source, group=group), _exchanged, _all_but_own
    ),
    "send_recv": Operation(_send_recv, lambda b: b.of_rank((b.rank - 1) % b.size), _all),
}
