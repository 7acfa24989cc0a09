"""The operations that are compared: how torch, mpi4py and C call each, and what it must leave.

The size of a case is the size of the whole message: what is broadcast, gathered in the end, given to be
reduced and scattered, exchanged with all, or sent there and back.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

__all__ = ["OPERATIONS", "Buffers", "Operation"]


@dataclass(frozen=True)
class Buffers:
    """Where an operation reads and writes. Every rank of ``size`` has a part of ``whole / size`` floats."""

    source: torch.Tensor
    target: torch.Tensor
    rank: int
    size: int

    @property
    def part(self) -> int:
        return self.target.numel() // self.size

    def fill(self) -> None:
        """Every rank's own numbers, small enough that sums are exact."""
        torch.remainder(torch.arange(self.source.numel(), dtype=torch.float32), 1000, out=self.source)
        self.source.add_(self.rank)
        self.target.copy_(self.source)

    def of_rank(self, rank: int) -> torch.Tensor:
        """What :meth:`fill` gave to another rank."""
        return self.source - self.rank + rank


@dataclass(frozen=True)
class Operation:
    """One collective, as a call through torch, through mpi4py, and as the letter of ``mpi_loop.c``."""

    name: str
    letter: str
    through_torch: Callable[[Buffers, dist.ProcessGroup], object]
    through_mpi4py: Callable[[Buffers, Any], object]
    verify: Callable[[Buffers], bool]
    fake_copies: bool = False  # torch's do-nothing backend does not do nothing

    def call_alone(self, buffers: Buffers, fake: dist.ProcessGroup) -> object:
        """Call torch's do-nothing backend ``fake``; where it would copy, for a broadcast instead."""
        return (_broadcast if self.fake_copies else self.through_torch)(buffers, fake)


def _broadcast(buffers: Buffers, group: dist.ProcessGroup) -> object:
    return dist.broadcast(buffers.target, 0, group=group)


def _ping_pong(buffers: Buffers, group: dist.ProcessGroup) -> None:
    if buffers.rank == 0:
        dist.send(buffers.target, 1, group=group)
        dist.recv(buffers.target, 1, group=group)
    elif buffers.rank == 1:
        dist.recv(buffers.target, 0, group=group)
        dist.send(buffers.target, 0, group=group)


def _mpi_ping_pong(buffers: Buffers, world: Any) -> None:
    array = buffers.target.numpy()
    if buffers.rank == 0:
        world.Send(array, 1)
        world.Recv(array, 1)
    elif buffers.rank == 1:
        world.Recv(array, 0)
        world.Send(array, 0)


def _first(buffers: Buffers, tensor: torch.Tensor) -> torch.Tensor:
    return tensor[: buffers.part]


def _mine(buffers: Buffers, tensor: torch.Tensor) -> torch.Tensor:
    return tensor[buffers.rank * buffers.part : (buffers.rank + 1) * buffers.part]


def _gathered(buffers: Buffers) -> torch.Tensor:
    return torch.cat([_first(buffers, buffers.of_rank(r)) for r in range(buffers.size)])


def _summed(buffers: Buffers) -> torch.Tensor:
    return _mine(buffers, torch.stack([buffers.of_rank(r) for r in range(buffers.size)]).sum(0))


def _exchanged(buffers: Buffers) -> torch.Tensor:
    return torch.cat([_mine(buffers, buffers.of_rank(r)) for r in range(buffers.size)])


OPERATIONS = [
    Operation(
        "broadcast",
        "b",
        _broadcast,
        lambda b, world: world.Bcast(b.target.numpy(), 0),
        lambda b: torch.equal(b.target, b.of_rank(0)),
    ),
    Operation(
        "all_gather",
        "g",
        lambda b, group: dist.all_gather_single(b.target, _first(b, b.source), group=group),
        lambda b, world: world.Allgather(_first(b, b.source).numpy(), b.target.numpy()),
        lambda b: torch.equal(b.target, _gathered(b)),
        fake_copies=True,
    ),
    Operation(
        "reduce_scatter",
        "s",
        lambda b, group: dist.reduce_scatter_single(_first(b, b.target), b.source, group=group),
        lambda b, world: world.Reduce_scatter_block(b.source.numpy(), _first(b, b.target).numpy()),
        lambda b: torch.equal(_first(b, b.target), _summed(b)),
        fake_copies=True,
    ),
    Operation(
        "all_to_all",
        "a",
        lambda b, group: dist.all_to_all_single(b.target, b.source, group=group),
        lambda b, world: world.Alltoall(b.source.numpy(), b.target.numpy()),
        lambda b: torch.equal(b.target, _exchanged(b)),
        fake_copies=True,
    ),
    Operation(
        "send and back",
        "p",
        _ping_pong,
        _mpi_ping_pong,
        lambda b: torch.equal(b.target, b.of_rank(0 if b.rank < 2 else b.rank)),
    ),
]
