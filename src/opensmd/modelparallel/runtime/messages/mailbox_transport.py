"""Messages through the shared-memory mailbox of smddp, between ranks of one host."""

from __future__ import annotations

import pickle
import time
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from opensmd.collectives.mailbox import Mailbox
from opensmd.modelparallel.exceptions import PeerFailed
from opensmd.modelparallel.runtime.messages.message import (
    ABORT,
    Message,
    SentTensor,
    no_gradient_tag,
    sent_tensors,
)
from opensmd.modelparallel.runtime.messages.transport import Expect, as_bytes

__all__ = ["MailboxTransport"]

_LOOK_AGAIN = 20e-6  # seconds: a short wait is shorter than waking up from a long one
_AWAKE = 100e-6  # seconds: shorter waits poll, because the shortest sleep may take as long


class MailboxTransport:
    """Over the shared-memory mailbox of smddp: receivers see what has come, in any order."""

    ordered = False

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._mailbox = Mailbox(group)
        self._rank = dist.get_rank(group)
        self._aborts = [(rank, ABORT) for rank in range(dist.get_world_size(group)) if rank != self._rank]

    def send(self, target: int, tag: int, tensor: Tensor) -> None:
        self._mailbox.send(target, tag, tensor)

    def receive(self, source: int, tag: int, count: int, dtype: torch.dtype) -> Tensor:
        # Through wait_any, which also notices that a rank has failed.
        if not self._mailbox.ready(source, tag):
            self.wait_any([(source, tag)])
        return self._mailbox.receive(source, tag, count, dtype)

    def take(
        self, source: int, tag: int, shape: Sequence[int], stride: Sequence[int], dtype: torch.dtype
    ) -> Tensor | None:
        return self._mailbox.take(source, tag, shape, stride, dtype)

    def send_edge(self, sent: Tensor, target: int, tag: int, expect: Expect) -> Tensor:
        return self._mailbox.send_edge(sent, target, tag, no_gradient_tag(tag), expect)

    def receive_edge(self, received: Tensor, source: int, tag: int) -> tuple[Tensor, Tensor]:
        return self._mailbox.receive_edge(received, source, tag, no_gradient_tag(tag))

    def send_object(self, target: int, tag: int, value: Any) -> None:
        data = as_bytes(pickle.dumps(value, pickle.HIGHEST_PROTOCOL))  # nothing else can reach the memory
        # The size first, because a receiver must know it in advance.
        self._mailbox.send(target, tag, torch.tensor([data.numel()], device="cpu"))
        self._mailbox.send(target, tag, data)

    def receive_object(self, source: int, tag: int) -> Any:
        self.wait_any([(source, tag)])
        return self._receive_object(source, tag)

    def _receive_object(self, source: int, tag: int) -> Any:
        size = int(self._mailbox.receive(source, tag, 1, torch.int64))
        data = self._mailbox.receive(source, tag, size, torch.uint8)
        return pickle.loads(data.numpy().tobytes())

    def ready(self, message: Message) -> bool:
        return self._mailbox.ready(*message)

    def wait_any(self, messages: Sequence[Message]) -> int:
        arrived = self._mailbox.wait_any([*messages, *self._aborts])
        if arrived >= len(messages):
            source, tag = self._aborts[arrived - len(messages)]
            raise PeerFailed(self._receive_object(source, tag))
        return arrived

    def comes_within(self, messages: Sequence[Message], seconds: float) -> bool:
        end = time.perf_counter() + seconds
        while not any(map(self.ready, messages)):
            remaining = end - time.perf_counter()
            if remaining <= 0:
                return False
            if seconds > _AWAKE:
                time.sleep(min(remaining, _LOOK_AGAIN))
        return True

    def flush(self) -> None:
        self._mailbox.flush()

    def sent(self) -> list[SentTensor]:
        return sent_tensors(self._mailbox.sent())

    def require_no_abort(self) -> None:
        for source, tag in self._aborts:
            if self._mailbox.ready(source, tag):
                raise PeerFailed(self._receive_object(source, tag))

    def close(self) -> None:
        pass
