"""Messages between the ranks of a pipeline on several hosts, received ahead of need.

Neither Gloo nor torch's ``recv`` can tell what has come. So for every other rank, a separate thread receives
for the lifetime of the transport, and puts messages into an inbox, where receivers can look as in a mailbox.
A message is a letter with its tag and size and, if short, its data::

    sender                                   receiver's thread              whoever needs it
    letter (tag, bytes, up to 496 of data) ─► received ahead ──► inbox ───► ready, take, wait_any
    payload, if it is more ─────────────────► received in full ┘

smddp carries them through shared memory on one host, and over the network between hosts. A rank's last
letters are farewells, as many as others have made memory for: what a group of the script's own carries
afterwards is the next transport's. If a rank's connection closes without one, it has died, which is an error
for ranks that wait for it.
"""

from __future__ import annotations

import contextlib
import math
import struct
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from opensmd.collectives import sealed
from opensmd.collectives._torch_internals import timeout_of
from opensmd.modelparallel.exceptions import PeerFailed
from opensmd.modelparallel.ranks.sendable import sendable
from opensmd.modelparallel.runtime.messages import edges
from opensmd.modelparallel.runtime.messages.message import ABORT, Message, SentTensor, gradient_messages
from opensmd.modelparallel.runtime.messages.outbox import Outbox
from opensmd.modelparallel.runtime.messages.transport import Expect, as_bytes
from opensmd.modelparallel.runtime.tensors.memory_layout import arranged

__all__ = ["HostsTransport"]

_LETTERS, _PAYLOADS = (1 << 29) - 1, (1 << 29) - 2  # the core's quiet tags
_HEAD = struct.Struct("qq")  # tag and bytes
_LETTER = 512  # bytes, including the head; all have the same size, which receivers must know
_AHEAD = 4  # letters for which memory is ready per sender
_FAREWELL = -1  # in place of a tag
_FOREVER = timedelta(days=365)
_PARTING = 1.0  # seconds for the others to say farewell, too
_MOMENT = timedelta(milliseconds=1)


class _Inbox:
    """Received but untaken messages, and lost ranks."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._data: defaultdict[Message, deque[Tensor]] = defaultdict(deque)
        self.lost: dict[int, str] = {}

    def put(self, message: Message, data: Tensor) -> None:
        with self._changed:
            self._data[message].append(data)
            self._changed.notify_all()

    def lose(self, source: int, why: str) -> None:
        with self._changed:
            self.lost[source] = why
            self._changed.notify_all()

    def has(self, message: Message) -> bool:
        return message in self._data

    def take(self, message: Message) -> Tensor | None:
        with self._changed:
            if message not in self._data:
                return None
            data = self._data[message].popleft()
            if not self._data[message]:
                del self._data[message]
            return data

    def wait(self, until: Callable[[], bool], seconds: float | None) -> bool:
        with self._changed:
            return self._changed.wait_for(until, seconds)


class HostsTransport:
    """Over smddp between ranks on several hosts: receivers see what has come, in any order. CPU tensors only.

    Args:
        group: the pipeline's ranks.
    """

    ordered = False

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self._rank = dist.get_rank(group)
        self._inbox = _Inbox()
        self._outbox = Outbox()
        others = [rank for rank in range(dist.get_world_size(group)) if rank != self._rank]
        self._aborts = [(rank, ABORT) for rank in others]
        self._receivers = {
            rank: threading.Thread(target=self._receive_from, args=(rank,), name="letters", daemon=True)
            for rank in others
        }
        for thread in self._receivers.values():
            thread.start()

    def send(self, target: int, tag: int, tensor: Tensor) -> None:
        self._outbox.note(target, tag)
        self._post(target, tag, sendable(tensor).detach().reshape(-1).view(torch.uint8))

    def receive(self, source: int, tag: int, count: int, dtype: torch.dtype) -> Tensor:
        self.wait_any([(source, tag)])
        return self._opened((source, tag), count, dtype)

    def take(
        self, source: int, tag: int, shape: Sequence[int], stride: Sequence[int], dtype: torch.dtype
    ) -> Tensor | None:
        if not self.ready((source, tag)):
            return None
        return arranged(self._opened((source, tag), math.prod(shape), dtype), shape, stride)

    def send_edge(self, sent: Tensor, target: int, tag: int, expect: Expect) -> Tensor:
        shape, dtype = sent.shape, sent.dtype
        gradient, none = gradient_messages(target, tag)

        def receive() -> Tensor | None:
            if not self.ready(gradient) and not self.ready(none):
                expect()
            if self.ready(gradient):
                return self._opened(gradient, shape.numel(), dtype).view(shape)
            self.receive(*none, 1, torch.uint8)
            return None

        return edges.send_edge(sent, receive)

    def receive_edge(self, received: Tensor, source: int, tag: int) -> tuple[Tensor, Tensor]:
        _, (_, none) = gradient_messages(source, tag)

        def send(gradient: Tensor | None) -> None:
            if gradient is None:
                self.send(source, none, torch.zeros(1, dtype=torch.uint8, device="cpu"))
            else:
                self.send(source, tag, gradient)

        return edges.receive_edge(received, send)

    def send_object(self, target: int, tag: int, value: Any) -> None:
        self._post(target, tag, as_bytes(sealed.dumps(value)))

    def receive_object(self, source: int, tag: int) -> Any:
        self.wait_any([(source, tag)])
        return self._object(source, tag)

    def ready(self, message: Message) -> bool:
        return self._inbox.has(message)

    def wait_any(self, messages: Sequence[Message]) -> int:
        limit = timeout_of(self._group)
        sources = {source for source, _ in messages}

        def something() -> bool:
            return self._came([*messages, *self._aborts]) or not sources.isdisjoint(self._inbox.lost)

        in_time = self._inbox.wait(something, None if limit is None else limit.total_seconds())
        for index, message in enumerate(messages):
            if self.ready(message):
                return index
        self.require_no_abort()
        raise self._failure(min(sources & set(self._inbox.lost) or sources), in_time=in_time)

    def comes_within(self, messages: Sequence[Message], seconds: float) -> bool:
        return self._inbox.wait(lambda: self._came(messages), seconds)

    def flush(self) -> None:
        self._outbox.flush()

    def sent(self) -> list[SentTensor]:
        return self._outbox.sent()

    def require_no_abort(self) -> None:
        for source, tag in self._aborts:
            if self.ready((source, tag)):
                raise PeerFailed(self._object(source, tag))

    def close(self) -> None:
        end = time.monotonic() + _PARTING
        for rank in self._receivers:
            with contextlib.suppress(RuntimeError):  # it may be gone
                for _ in range(_AHEAD):
                    self._post(rank, _FAREWELL, torch.empty(0, dtype=torch.uint8, device="cpu"))
        for thread in self._receivers.values():
            thread.join(max(0.0, end - time.monotonic()))

    def _came(self, messages: Sequence[Message]) -> bool:
        return any(map(self.ready, messages))

    def _opened(self, message: Message, count: int, dtype: torch.dtype) -> Tensor:
        data = self._inbox.take(message)
        assert data is not None
        if data.numel() != count * dtype.itemsize:
            raise dist.DistBackendError(
                f"the message from pipeline rank {message[0]} with tag {message[1]} has {data.numel()} "
                f"bytes, the receiver expected {count * dtype.itemsize}"
            )
        return data.view(dtype)

    def _object(self, source: int, tag: int) -> Any:
        data = self._inbox.take((source, tag))
        assert data is not None
        return sealed.loads(data.numpy().tobytes())

    def _post(self, target: int, tag: int, data: Tensor) -> None:
        inside = data.numel() <= _LETTER - _HEAD.size
        letter = _HEAD.pack(tag, data.numel()) + (data.numpy().tobytes() if inside else b"")
        self._isend(target, _LETTERS, as_bytes(letter.ljust(_LETTER, b"\0")))
        if not inside:
            self._isend(target, _PAYLOADS, data)

    def _isend(self, target: int, tag: int, data: Tensor) -> None:
        self._outbox.add(dist.isend(data, group=self._group, tag=tag, group_dst=target), data)

    def _receive_from(self, source: int) -> None:
        """Receive all that a rank sends, until it says farewell or is lost."""
        ahead: deque[tuple[dist.Work, Tensor]] = deque()
        try:
            while True:
                while len(ahead) < _AHEAD:
                    ahead.append(self._irecv(source, _LETTERS, _LETTER))
                work, letter = ahead.popleft()
                work.wait(_FOREVER)
                tag, size = _HEAD.unpack(letter[: _HEAD.size].numpy().tobytes())
                if tag == _FAREWELL:
                    break
                data = letter[_HEAD.size : _HEAD.size + size]
                if size > data.numel():
                    work, data = self._irecv(source, _PAYLOADS, size)
                    work.wait(_FOREVER)
                self._inbox.put((source, tag), data)
        except RuntimeError as error:
            self._inbox.lose(source, str(error))
            return
        with contextlib.suppress(RuntimeError):  # having taken its leave, it may be gone
            for work, _ in ahead:
                work.wait(_FOREVER)

    def _irecv(self, source: int, tag: int, size: int) -> tuple[dist.Work, Tensor]:
        into = torch.empty(size, dtype=torch.uint8, device="cpu")
        work = dist.irecv(into, group=self._group, tag=tag, group_src=source)
        assert work is not None
        return work, into

    def _failure(self, source: int, *, in_time: bool) -> Exception:
        """Return the group's error about a rank that is lost or does not send, as from a receive."""
        try:
            into = torch.empty(1, dtype=torch.uint8, device="cpu")
            work = dist.irecv(into, group=self._group, group_src=source)
            assert work is not None
            work.wait(_MOMENT)
        except RuntimeError as error:
            waited = "" if in_time else f"nothing came in {timeout_of(self._group)}: "
            return dist.DistBackendError(f"{waited}{error}")
        return dist.DistBackendError(self._inbox.lost.get(source, f"pipeline rank {source} is lost"))
