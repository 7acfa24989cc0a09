"""Messages between the ranks of a group, for programs that do not know in which order they need them.

This is the pipeline's transport: a sender never waits for its receiver, and a receiver can ask what has come.
It is independent of ``torch.distributed``'s send and recv, because it has its own tags.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from opensmd.collectives import _torch_internals
from opensmd.native import core

__all__ = ["Mailbox", "has_mailbox", "spans_hosts"]

_GROUPS_TIMEOUT = timedelta(0)


def has_mailbox(group: dist.ProcessGroup | None = None) -> bool:
    """Whether smddp serves ``group`` (default: the default group) through shared memory."""
    backend = _torch_internals.cpu_backend(group)
    return hasattr(backend, "spans_hosts") and not backend.spans_hosts()


def spans_hosts(group: dist.ProcessGroup | None = None) -> bool:
    """Whether smddp serves ``group`` (default: the default group) on several hosts."""
    backend = _torch_internals.cpu_backend(group)
    return hasattr(backend, "spans_hosts") and bool(backend.spans_hosts())


class Mailbox:
    """One rank's end of the messages in one group. Ranks are the group's; CPU tensors only.

    Messages from one rank with one tag arrive in the order of sending. Tags have 40 bits.

    Args:
        group: a process group with backend smddp and all ranks on one host.

    Raises:
        ValueError: something else serves the group; check :func:`has_mailbox` first.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        if not has_mailbox(group):
            raise ValueError(
                "a mailbox needs a group of the smddp backend whose ranks are all on one host; use "
                "torch.distributed's isend and irecv for other groups"
            )
        self._mailbox = core.Mailbox(_torch_internals.cpu_backend(group))

    def send(self, dst: int, tag: int, tensor: Tensor) -> None:
        """Send to group rank ``dst`` and return at once.

        ``tensor`` must not change until it has left; it is kept alive until then.
        """
        self._mailbox.send(dst, tag, tensor)

    def ready(self, src: int, tag: int) -> bool:
        """Whether a message from ``src`` with ``tag`` has started to arrive."""
        return self._mailbox.ready(src, tag)

    def receive(
        self, src: int, tag: int, count: int, dtype: torch.dtype, *, timeout: timedelta = _GROUPS_TIMEOUT
    ) -> Tensor:
        """Receive ``count`` elements as a vector. A large one stays where the sender has put it.

        Raises:
            DistBackendError: the message has another size, the sender is lost, or nothing came within
                ``timeout`` (default: the group's).
        """
        return self._mailbox.receive(src, tag, count, dtype, timeout)

    def take(
        self, src: int, tag: int, shape: Sequence[int], stride: Sequence[int], dtype: torch.dtype
    ) -> Tensor | None:
        """Return a message that has started to arrive, as a tensor of ``shape``; None if none has.

        Args:
            stride: that of the tensor, which must fill its memory; empty for a contiguous one.

        Raises:
            DistBackendError: as in :meth:`receive`.
        """
        return self._mailbox.take(src, tag, shape, stride, dtype)

    def wait_any(self, wanted: Sequence[tuple[int, int]], *, timeout: timedelta = _GROUPS_TIMEOUT) -> int:
        """Wait until a message for one of the ``(src, tag)`` pairs has started to arrive.

        Returns:
            The index of the first such pair.

        Raises:
            DistBackendError: a member is lost, or nothing came within ``timeout`` (default: the group's),
                which ends the group.
        """
        return self._mailbox.wait_any(wanted, timeout)

    def flush(self, *, timeout: timedelta = _GROUPS_TIMEOUT) -> None:
        """Wait until everything sent has left this process's tensors."""
        self._mailbox.flush(timeout)

    def sent(self) -> list[tuple[int, int, int]]:
        """Return the latest few thousand messages: time (``time.perf_counter_ns()``), target rank and tag."""
        return self._mailbox.sent()

    def send_edge(
        self, sent: Tensor, peer: int, tag: int, missing: int, expect: Callable[[], None]
    ) -> Tensor:
        """Create an autograd edge to ``peer``, to which ``sent`` was sent.

        Args:
            tag: that of the gradient that will come in backward.
            missing: the tag of the "no gradient" message.
            expect: called in backward if neither has come; returns when one has.

        Returns:
            A token: a tensor without elements, where backward starts.
        """
        return core.send_edge(sent, self._mailbox, peer, tag, missing, expect)

    def receive_edge(self, received: Tensor, peer: int, tag: int, missing: int) -> tuple[Tensor, Tensor]:
        """Create the other end: ``received`` as part of the graph, and a token.

        In backward, its gradient goes back to ``peer`` with ``tag``, or one byte with ``missing``.
        """
        return core.receive_edge(received, self._mailbox, peer, tag, missing)
