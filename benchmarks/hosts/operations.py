"""The collectives compared between hosts: how each is called, what it must leave, and what must cross.

The size of a case is that of the whole message: the tensor, what is gathered in the end or scattered, what a
rank gives to be reduced and scattered or exchanged.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

__all__ = ["OPERATIONS", "Buffers", "Operation", "least_bytes"]


@dataclass(frozen=True)
class Buffers:
    """Where an operation reads and writes, as much as ``whole``."""

    source: torch.Tensor
    target: torch.Tensor
    rank: int
    size: int

    @staticmethod
    def of(nbytes: int, dtype: torch.dtype, rank: int, size: int) -> Buffers:
        """Tensors of about ``nbytes``, of as many elements for each rank."""
        each = max(1, nbytes // dtype.itemsize // size)
        zeros = torch.zeros(each * size, dtype=dtype)
        return Buffers(zeros, zeros.clone(), rank, size)

    def numbers(self, rank: int) -> torch.Tensor:
        """What :meth:`fill` gives to ``rank``: so small that sums are exact in all types."""
        return torch.arange(self.source.numel()).remainder_(7).add_(rank).to(self.source.dtype)

    def fill(self) -> None:
        """Every rank's own numbers."""
        self.source.copy_(self.numbers(self.rank))
        self.target.copy_(self.source)

    def pieces(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """One for each rank."""
        return list(tensor.chunk(self.size))

    def sums(self) -> torch.Tensor:
        """Of all ranks' numbers."""
        every = torch.stack([self.numbers(rank).float() for rank in range(self.size)])
        return every.sum(0).to(self.source.dtype)


@dataclass(frozen=True)
class Operation:
    """One collective.

    Attributes:
        call: through torch.
        right: what the target must hold then, and where.
        crosses: the share of the size that crosses the busiest link, of the numbers of ranks on each host.
    """

    name: str
    call: Callable[[Buffers, dist.ProcessGroup], object]
    right: Callable[[Buffers], bool]
    crosses: Callable[[Sequence[int]], float]

    def verify(self, buffers: Buffers) -> bool:
        """Whether the last call left what it must. Leaves zeros, which can be added up any time."""
        right = self.right(buffers)
        buffers.source.zero_()
        buffers.target.zero_()
        return right


def least_bytes(operation: Operation, nbytes: int, hosts: Sequence[int]) -> float:
    """The fewest bytes that cross the busiest link, one way, with so many ranks on each host."""
    return nbytes * operation.crosses(hosts)


def _whole(hosts: Sequence[int]) -> float:
    return float(len(hosts) > 1)


def _of_others(hosts: Sequence[int]) -> float:
    return (sum(hosts) - min(hosts)) / sum(hosts)


def _of_others_than_the_first(hosts: Sequence[int]) -> float:
    return (sum(hosts) - hosts[0]) / sum(hosts)


def _exchanged(hosts: Sequence[int]) -> float:
    return max(here * (sum(hosts) - here) / sum(hosts) for here in hosts)


def _twice(hosts: Sequence[int]) -> float:
    return 2 * (len(hosts) - 1) / len(hosts)


def _gather(b: Buffers, group: dist.ProcessGroup) -> None:
    into = b.pieces(b.target) if b.rank == 0 else None
    dist.gather(b.pieces(b.source)[0], into, 0, group=group)


def _scatter(b: Buffers, group: dist.ProcessGroup) -> None:
    pieces = b.pieces(b.source) if b.rank == 0 else None
    dist.scatter(b.pieces(b.target)[0], pieces, 0, group=group)


def _all_gather(b: Buffers, group: dist.ProcessGroup) -> None:
    dist.all_gather(b.pieces(b.target), b.pieces(b.source)[0], group=group)


def _reduce_scatter(b: Buffers, group: dist.ProcessGroup) -> None:
    dist.reduce_scatter_single(b.pieces(b.target)[0], b.source, group=group)


def _all_to_all(b: Buffers, group: dist.ProcessGroup) -> None:
    dist.all_to_all_single(b.target, b.source, group=group)


def _first_pieces(b: Buffers) -> torch.Tensor:
    return torch.cat([b.pieces(b.numbers(rank))[0] for rank in range(b.size)])


def _own_pieces(b: Buffers) -> torch.Tensor:
    return torch.cat([b.pieces(b.numbers(rank))[b.rank] for rank in range(b.size)])


OPERATIONS = [
    Operation(
        "all_reduce",
        lambda b, group: dist.all_reduce(b.target, group=group),
        lambda b: torch.equal(b.target, b.sums()),
        _twice,
    ),
    Operation(
        "broadcast",
        lambda b, group: dist.broadcast(b.target, 0, group=group),
        lambda b: torch.equal(b.target, b.numbers(0)),
        _whole,
    ),
    Operation(
        "reduce",
        lambda b, group: dist.reduce(b.target, 0, group=group),
        lambda b: b.rank != 0 or torch.equal(b.target, b.sums()),
        _whole,
    ),
    Operation("all_gather", _all_gather, lambda b: torch.equal(b.target, _first_pieces(b)), _of_others),
    Operation(
        "reduce_scatter",
        _reduce_scatter,
        lambda b: torch.equal(b.pieces(b.target)[0], b.pieces(b.sums())[b.rank]),
        _of_others,
    ),
    Operation("all_to_all", _all_to_all, lambda b: torch.equal(b.target, _own_pieces(b)), _exchanged),
    Operation(
        "gather",
        _gather,
        lambda b: b.rank != 0 or torch.equal(b.target, _first_pieces(b)),
        _of_others_than_the_first,
    ),
    Operation(
        "scatter",
        _scatter,
        lambda b: torch.equal(b.pieces(b.target)[0], b.pieces(b.numbers(0))[b.rank]),
        _of_others_than_the_first,
    ),
]
