"""Messages between the ranks of one pipeline: tensors, gradients or their absence, and small objects.

Sending never waits for the receiver. Three ways lead from rank to rank, all of one form:

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
    """One rank's end of a pipeline's messages. Ranks are the pipeline group's."""

    ordered: bool

    def send(self, target: int, tag: int, tensor: Tensor) -> None:
        """Send the data of ``tensor``, which must not change before :meth:`flush`."""

    def receive(self, source: int, tag: int, count: int, dtype: torch.dtype) -> Tensor:
        """Wait for ``count`` numbers; a vector."""

    def take(
        self, source: int, tag: int, shape: Sequence[int], stride: Sequence[int], dtype: torch.dtype
    ) -> Tensor | None:
        """A tensor that has come, with these strides (none: contiguous); None if it has not."""

    def send_edge(self, sent: Tensor, target: int, tag: int, expect: Expect) -> Tensor:
        """The token of a sent tensor, which backward begins at: then a gradient comes, or that there is none.

        ``tag`` is of kind GRADIENT. Backward calls ``expect`` before it waits for the gradient.
        """

    def receive_edge(self, received: Tensor, source: int, tag: int) -> tuple[Tensor, Tensor]:
        """A received tensor as part of the graph, and its token; its gradient goes back with ``tag``."""

    def send_object(self, target: int, tag: int, value: Any) -> None:
        """Send a small picklable object."""

    def receive_object(self, source: int, tag: int) -> Any:
        """Wait for an object."""

    def ready(self, message: Message) -> bool:
        """Whether a message has come; ordered transports cannot know and say True."""

    def wait_any(self, messages: Sequence[Message]) -> int:
        """Wait until one of the messages has come, and say which."""

    def comes_within(self, messages: Sequence[Message], seconds: float) -> bool:
        """Wait at most so long until one of the messages has come, and say whether it has."""

    def flush(self) -> None:
        """Wait until everything sent may be changed."""

    def sent(self) -> list[SentTensor]:
        """The latest tensors and gradients that have left, some thousands, earliest first."""

    def require_no_abort(self) -> None:
        """Raise PeerFailed if a rank has announced that it failed; ordered transports cannot know."""

    def close(self) -> None:
        """Take leave of the others: nothing is sent or received any more."""


def abort(transport: Transport, ranks: Sequence[int], text: str) -> None:
    """Tell the others that this rank has failed, as far as they can still be told."""
    if transport.ordered:
        return  # they may be waiting for anything; the group's timeout ends them
    for rank in ranks:
        with contextlib.suppress(RuntimeError):
            transport.send_object(rank, ABORT, text)


def as_bytes(data: bytes) -> Tensor:
    """Memory of its own, which nobody else reaches."""
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)
