"""Messages through the send and recv of any process group, in the order of the program."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from opensmd.collectives import sealed
from opensmd.collectives._torch_internals import timeout_of
from opensmd.modelparallel.ranks.sendable import sendable
from opensmd.modelparallel.runtime.messages import edges
from opensmd.modelparallel.runtime.messages.message import Message, SentTensor, short_tag
from opensmd.modelparallel.runtime.messages.outbox import Outbox
from opensmd.modelparallel.runtime.messages.transport import Expect, as_bytes
from opensmd.modelparallel.runtime.tensors.memory_layout import arranged

__all__ = ["GroupTransport"]


class GroupTransport:
    """Over the send and recv of any process group, in the order of the program.

    The two directions between a pair of ranks have separate groups, because on an accelerator a send blocks
    its group until it is received. Messages carry memory of that device: anything elsewhere is copied there
    first, and copied back by the receiver.
    """

    ordered = True

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        members = dist.get_process_group_ranks(group)
        self._members = members
        self._rank = dist.get_rank(group)
        self._device = device
        self._as_bytes = device.type != "cpu"  # NCCL lacks complex numbers and some integers
        self._outbox = Outbox()
        self._up = group
        self._down = group
        if device.type != "cpu":
            self._down = dist.new_group(members, timeout=timeout_of(group), use_local_synchronization=True)

    def send(self, target: int, tag: int, tensor: Tensor) -> None:
        group = self._up if target > self._rank else self._down
        data = sendable(tensor).to(self._device)
        if self._as_bytes:
            data = data.reshape(-1).view(torch.uint8)
        self._outbox.note(target, tag)
        self._outbox.add(dist.isend(data, group=group, tag=short_tag(tag), group_dst=target), data)

    def receive(self, source: int, tag: int, count: int, dtype: torch.dtype) -> Tensor:
        group = self._up if source < self._rank else self._down
        size, kind = (count * dtype.itemsize, torch.uint8) if self._as_bytes else (count, dtype)
        into = torch.empty(size, dtype=kind, device=self._device)
        dist.recv(into, group=group, tag=short_tag(tag), group_src=source)
        return into.view(dtype)

    def take(
        self, source: int, tag: int, shape: Sequence[int], stride: Sequence[int], dtype: torch.dtype
    ) -> Tensor | None:
        return arranged(self.receive(source, tag, math.prod(shape), dtype), shape, stride)

    def send_edge(self, sent: Tensor, target: int, tag: int, expect: Expect) -> Tensor:
        shape, dtype, device = sent.shape, sent.dtype, sent.device

        def receive() -> Tensor | None:
            expect()
            # Checked first, because here one cannot see which of two messages has come.
            if not self.receive(target, tag, 1, torch.int64).item():
                return None
            return self.receive(target, tag, shape.numel(), dtype).view(shape).to(device)

        return edges.send_edge(sent, receive, self._device)

    def receive_edge(self, received: Tensor, source: int, tag: int) -> tuple[Tensor, Tensor]:
        def send(gradient: Tensor | None) -> None:
            self.send(source, tag, self._number(gradient is not None))
            if gradient is not None:
                self.send(source, tag, gradient)

        return edges.receive_edge(received, send, self._device)

    def send_object(self, target: int, tag: int, value: Any) -> None:
        data = as_bytes(sealed.dumps(value)).to(self._device)
        self.send(target, tag, self._number(data.numel()))
        self.send(target, tag, data)

    def receive_object(self, source: int, tag: int) -> Any:
        size = int(self.receive(source, tag, 1, torch.int64).item())
        data = self.receive(source, tag, size, torch.uint8)
        return sealed.loads(data.cpu().numpy().tobytes())

    def ready(self, message: Message) -> bool:
        return True

    def wait_any(self, messages: Sequence[Message]) -> int:
        return 0

    def comes_within(self, messages: Sequence[Message], seconds: float) -> bool:
        return True

    def flush(self) -> None:
        self._outbox.flush()

    def _number(self, value: int) -> Tensor:
        """Create a number on the device; a copy from the host would wait for all of the device's work."""
        return torch.full((1,), value, dtype=torch.int64, device=self._device)

    def sent(self) -> list[SentTensor]:
        return self._outbox.sent()

    def require_no_abort(self) -> None:
        pass

    def close(self) -> None:
        pass
