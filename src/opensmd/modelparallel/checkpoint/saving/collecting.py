"""Sending pieces of tensors to the rank that writes them, one tensor at a time.

Ranks that share parameters or the optimizer's state save into one file of whole tensors. Each sends its
pieces in the file's order::

    rank 0      writes | asks for tensor 1, receives, writes | asks for tensor 2, receives, writes | ...
    the others  send their pieces of tensor 1 | of tensor 2 | ...        each waits until it is received

So no rank ever holds more than one tensor of the others, and training is not held up.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from opensmd.modelparallel.checkpoint.saving.tensors_later import LaterMemory, TensorLater
from opensmd.modelparallel.ranks.spread import Spread
from opensmd.modelparallel.state_dicts.merge import with_versions

__all__ = ["Collecting", "send_pieces", "spread_in", "with_entries"]


class Collecting:
    """Receives pieces on rank 0 of the group while it writes.

    Args:
        contents: the contents of the files, in the order in which they are written.
        group: the ranks that have pieces.
    """

    def __init__(self, contents: Sequence[Any], group: dist.ProcessGroup) -> None:
        self._coming = _unique(contents)
        self._group = group

    def in_turn(self, content: Any) -> Any:
        """Return ``content`` ready to write; its tensors in pieces are received when their turn comes."""
        memory: dict[int, LaterMemory] = {}

        def later(value: Any) -> Any:
            if not isinstance(value, Spread):
                return value
            if value.number not in memory:
                memory[value.number] = self._later(value)
            return TensorLater(memory[value.number], value.shape, value.dtype)

        return with_entries(content, later)

    def receive_rest(self) -> None:
        """After a failure, receive what no file needs any more, because the other ranks wait for that."""
        while self._coming:
            self._receive(self._coming[0])

    def _later(self, spread: Spread) -> LaterMemory:
        """Return memory that is received on first use."""
        return TensorLater.memory_for(
            sum(spread.sizes), spread.dtype, functools.partial(self._receive, spread)
        )

    def _receive(self, spread: Spread) -> Tensor:
        assert self._coming[0].number == spread.number, "tensors are written in another order than sent"
        del self._coming[0]
        whole = torch.empty(sum(spread.sizes), dtype=spread.dtype, device="cpu")
        first = 0
        for rank, size in enumerate(spread.sizes):
            part = whole[first : first + size]
            first += size
            if rank == 0:
                part.copy_(spread.piece)
            elif size:
                _receive_into(part, spread, rank, self._group)
        return whole


def _receive_into(part: Tensor, spread: Spread, rank: int, group: dist.ProcessGroup) -> None:
    device = spread.piece.device
    there = part if device.type == "cpu" else torch.empty_like(part, device=device)
    dist.recv(there, group=group, group_src=rank)
    if there is not part:
        part.copy_(there)


def send_pieces(contents: Sequence[Any], group: dist.ProcessGroup) -> None:
    """Send this rank's pieces to rank 0 of the group, which receives each in its turn."""
    for spread in _unique(contents):
        if spread.piece.numel():
            dist.send(spread.piece, group=group, group_dst=0)


def spread_in(content: Any) -> list[Spread]:
    """Return the tensors in pieces of a state dict, in the order in which they are written."""
    found: list[Spread] = []

    def note(value: Any) -> Any:
        if isinstance(value, Spread):
            found.append(value)
        return value

    with_entries(content, note)
    return found


def with_entries(content: Any, change: Callable[[Any], Any]) -> Any:
    """Apply ``change`` to the values in mappings and lists; return ``content`` itself if none changes."""
    if isinstance(content, Mapping):
        made = {name: with_entries(each, change) for name, each in content.items()}
        stays = all(made[name] is each for name, each in content.items())
        return content if stays else with_versions(made, content)
    if isinstance(content, list):
        row = [with_entries(each, change) for each in content]
        return content if all(map(operator.is_, row, content)) else row
    return change(content)


def _unique(contents: Sequence[Any]) -> list[Spread]:
    """Return every tensor once per file; each file that has it writes it again."""
    found: list[Spread] = []
    for content in contents:
        found += {spread.number: spread for spread in spread_in(content)}.values()
    return found
