"""Messages between the ranks of a group for programs that do not know in which order they will need them.

The pipeline's transport: a sender is never held up by its receiver, a receiver can ask what has come. Beside
``torch.distributed``'s send and recv, whose messages it never meets, because its tags are its own.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import DistBackendError

from opensmd.collectives import _torch_internals
from opensmd.collectives.blocks import BLOCK_BYTES, Blocks

__all__ = ["Mailbox", "has_mailbox"]

# torch's own tags are 32 bits wide.
_OWN_TAGS = 1 << 40


def has_mailbox(group: Any = None) -> bool:
    """Whether smddp serves ``group`` (default: the default group) through shared memory."""
    backend = _torch_internals.cpu_backend(group)
    return hasattr(backend, "spans_hosts") and not backend.spans_hosts()


class Mailbox:
    """One rank's end of the messages within one group. Ranks are the group's; CPU tensors only.

    Messages from one rank with one tag arrive in the order in which they were sent.

    Args:
        group: a process group whose backend is smddp and whose ranks are on one host.

    Raises:
        ValueError: the group is served by something else; ask :func:`has_mailbox` first.
    """

    def __init__(self, group: Any = None) -> None:
        if not has_mailbox(group):
            raise ValueError(
                "a mailbox needs a group of the smddp backend whose ranks are all on one host; use "
                "torch.distributed's isend and irecv for other groups"
            )
        backend = _torch_internals.cpu_backend(group)
        self._group = backend.shared_group
        self._blocks = Blocks(backend)
        self._leaving: deque[tuple[Any, torch.Tensor]] = deque()

    def send(self, dst: int, tag: int, tensor: torch.Tensor) -> None:
        """Send to group rank ``dst`` and return at once.

        ``tensor`` must not be changed until it has left; what is sent is kept alive until then.
        """
        data = tensor.detach() if tensor.requires_grad else tensor
        data = data.contiguous()
        if data.nbytes >= BLOCK_BYTES:
            place = self._blocks.put(data)
            self._post(dst, tag, torch.tensor([-1, data.nbytes]) if place is None else place)
            if place is not None:
                return
        self._post(dst, tag, data)

    def _post(self, dst: int, tag: int, data: torch.Tensor) -> None:
        request = self._group.post_send(data, dst, _own(tag))
        self._forget_what_left()
        if not request.done():
            self._leaving.append((request, data))

    def ready(self, src: int, tag: int) -> bool:
        """Whether a message from ``src`` with ``tag`` has begun to arrive."""
        self._forget_what_left()
        return bool(self._group.ready(src, _own(tag)))

    def receive(
        self, src: int, tag: int, count: int, dtype: torch.dtype, *, timeout: timedelta | None = None
    ) -> torch.Tensor:
        """Receive ``count`` numbers as a vector. A large one stays where the sender has put it.

        Raises:
            DistBackendError: the message has another size, the sender is lost, or nothing came within
                ``timeout`` (default: the group's).
        """
        if count * dtype.itemsize >= BLOCK_BYTES:
            place = torch.empty(2, dtype=torch.int64)
            self._receive_into(src, tag, place, timeout)
            offset, size = place.tolist()
            if size != count * dtype.itemsize:
                raise DistBackendError(
                    f"the message from rank {src} with tag {tag} has {size} bytes, the receiver expected "
                    f"{count * dtype.itemsize}"
                )
            if offset >= 0:
                return self._blocks.lent(src, offset, size).view(dtype)
        received = torch.empty(count, dtype=dtype)
        self._receive_into(src, tag, received, timeout)
        return received

    def _receive_into(self, src: int, tag: int, tensor: torch.Tensor, timeout: timedelta | None) -> None:
        request = self._group.post_receive(tensor, src, _own(tag))
        request.wait(timeout or timedelta(0))

    def wait_any(self, wanted: Sequence[tuple[int, int]], *, timeout: timedelta | None = None) -> int:
        """Wait until a message for one of the ``(src, tag)`` pairs has begun to arrive.

        Returns:
            The index of the first such pair.

        Raises:
            DistBackendError: a member is lost, or nothing came within ``timeout`` (default: the group's),
                which ends the group.
        """
        self._forget_what_left()
        pairs = [(src, _own(tag)) for src, tag in wanted]
        return int(self._group.wait_ready(pairs, timeout or timedelta(0)))

    def flush(self, *, timeout: timedelta | None = None) -> None:
        """Wait until everything sent has left this process's tensors."""
        while self._leaving:
            request, _ = self._leaving.popleft()
            request.wait(timeout or timedelta(0))

    def _forget_what_left(self) -> None:
        while self._leaving and self._leaving[0][0].done():
            self._leaving.popleft()


def _own(tag: int) -> int:
    if not 0 <= tag < _OWN_TAGS:
        raise ValueError(f"a tag must be between 0 and {_OWN_TAGS - 1}, got {tag}")
    return _OWN_TAGS + tag
