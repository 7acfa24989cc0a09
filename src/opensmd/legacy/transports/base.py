"""The interface of transports, and all that the API, the groups and the model wrappers know of them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch

from opensmd.legacy.names import reduce_op
from opensmd.legacy.requests import Request

__all__ = ["Channel", "LegacyTransport"]


class Channel(ABC):
    """The collectives of one group. Roots are positions in the group.

    Tensors may have any layout, dtype and device unless the transport says otherwise; all members call the
    same operations in the same order.
    """

    @abstractmethod
    def broadcast(self, tensor: torch.Tensor, root: int) -> None:
        """Copy the root's tensor to all."""

    @abstractmethod
    def all_reduce(self, tensor: torch.Tensor, op: reduce_op) -> None:
        """Reduce in place, on all."""

    @abstractmethod
    def reduce(self, tensor: torch.Tensor, root: int, op: reduce_op) -> None:
        """Reduce in place on the root; the others' tensors keep their values."""

    @abstractmethod
    def all_gather(self, outputs: Sequence[torch.Tensor], tensor: torch.Tensor) -> None:
        """Copy every member's tensor to ``outputs``, by position, on all."""

    @abstractmethod
    def gather(self, outputs: Sequence[torch.Tensor] | None, tensor: torch.Tensor, root: int) -> None:
        """Copy every member's tensor to the root's ``outputs``."""

    @abstractmethod
    def scatter(self, tensor: torch.Tensor, inputs: Sequence[torch.Tensor] | None, root: int) -> None:
        """Copy the root's ``inputs``, by position, to each member's tensor."""

    @abstractmethod
    def barrier(self) -> None:
        """Wait until all members are here."""


class LegacyTransport(ABC):
    """One process's end of a job: messages between any two ranks, and channels for groups.

    Attributes:
        rank: this process.
        world_size: number of processes.
        world: the channel of all processes.
    """

    rank: int
    world_size: int
    world: Channel

    @abstractmethod
    def channel(self, ranks: list[int]) -> Channel | None:
        """Return a new group's channel, or None for non-members; all processes call, in the same order.

        Raises:
            RuntimeError: the processes named different ranks.
        """

    @abstractmethod
    def send(self, tensor: torch.Tensor, dst: int) -> None:
        """Send ``tensor``; return when it may be changed."""

    @abstractmethod
    def recv(self, tensor: torch.Tensor, src: int | None) -> int:
        """Receive from ``src`` or any rank; return the sender."""

    @abstractmethod
    def isend(self, tensor: torch.Tensor, dst: int) -> Request:
        """Start sending."""

    @abstractmethod
    def irecv(self, tensor: torch.Tensor, src: int) -> Request:
        """Start receiving."""

    @abstractmethod
    def close(self) -> None:
        """Finish sending and free everything."""
