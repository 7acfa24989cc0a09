"""Messages between the ranks of one pipeline: tensors, gradients or their absence, and small objects.

Sending never waits for the receiver. There are three implementations of one interface:

===================  =============================================================================
MailboxTransport     smddp's shared memory, between ranks of one host
HostsTransport       smddp between hosts: threads receive ahead of need
GroupTransport       any process group, such as NCCL's: in the order of the program
===================  =============================================================================
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from opensmd.modelparallel.runtime.messages.message import ABORT, Message, SentTensor

__all__ = ["Expect", "Transport", "abort", "as_bytes"]

Expect = Callable[[], None]


class Transport(Protocol):
    """One rank's end of a pipeline's messages. Ranks are those of the pipeline group."""

    ordered: bool

    def send(self, target: int, tag: int, tensor: Tensor) -> None:
        """Send the data of ``tensor``, which must not change before :meth:`flush`."""

    def receive(self, source: int, tag: int, count: int, dtype: torch.dtype) -> Tensor:
        """Wait for ``count`` elements; return a vector."""

    def take(
        self, source: int, tag: int, shape: Sequence[int], stride: Sequence[int], dtype: torch.dtype
    ) -> Tensor | None:
        """Return a received tensor with these strides (none: contiguous); None if it has not come."""

    def send_edge(self, sent: Tensor, target: int, tag: int, expect: Expect) -> Tensor:
        """Return the token of a sent tensor, where backward starts, with a gradient or without one.

        ``tag`` is of kind GRADIENT. Backward calls ``expect`` before it waits for the gradient.
        """

    def receive_edge(self, received: Tensor, source: int, tag: int) -> tuple[Tensor, Tensor]:
        """Return a received tensor in the graph, and its token; its gradient goes back with ``tag``."""

    def send_object(self, target: int, tag: int, value: Any) -> None:
        """Send a small picklable object."""

    def receive_object(self, source: int, tag: int) -> Any:
        """Wait for an object."""

    def ready(self, message: Message) -> bool:
        """Whether a message has come; ordered transports cannot know, and return True."""

    def wait_any(self, messages: Sequence[Message]) -> int:
        """Wait until one of the messages has come, and return it."""

    def comes_within(self, messages: Sequence[Message], seconds: float) -> bool:
        """Wait at most so long for one of the messages, and return whether one has come."""

    def flush(self) -> None:
        """Wait until everything sent may be changed."""

    def sent(self) -> list[SentTensor]:
        """Return the latest few thousand sent tensors and gradients, earliest first."""

    def require_no_abort(self) -> None:
        """Raise PeerFailed if a rank has announced that it failed; ordered transports cannot know."""

    def close(self) -> None:
        """Say goodbye to the others; nothing is sent or received any more."""


def abort(transport: Transport, ranks: Sequence[int], text: str) -> None:
    """Tell the others that this rank has failed, if they can still be reached."""
    if transport.ordered:
        return  # they may be waiting for anything; the group's timeout ends that
    for rank in ranks:
        with contextlib.suppress(RuntimeError):
            transport.send_object(rank, ABORT, text)


def as_bytes(data: bytes) -> Tensor:
    """Return a copy in its own memory, which nothing else can reach."""
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)
