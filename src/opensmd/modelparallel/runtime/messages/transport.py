"""Messages between the ranks of one pipeline: tensors, gradients or their absence, and small objects.

A message is known by its sender and a tag that both ends compute from the program: kind, microbatch, number
of the intercepted call, and a few bits of a check. Sending never waits for the receiver.
"""

from __future__ import annotations

import contextlib
import math
import pickle
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from opensmd.collectives import sealed
from opensmd.collectives._torch_internals import timeout_of
from opensmd.collectives.mailbox import Mailbox
from opensmd.modelparallel.exceptions import PeerFailed
from opensmd.modelparallel.ranks.sendable import sendable
from opensmd.modelparallel.runtime.messages import edges
from opensmd.modelparallel.runtime.tensors.memory_layout import arranged

__all__ = [
    "ABORT",
    "REMEMBERED",
    "GroupTransport",
    "Kind",
    "Expect",
    "MailboxTransport",
    "Message",
    "SentTensor",
    "Transport",
    "as_bytes",
    "gradient_messages",
    "make_tag",
    "tensors_among",
]

Message = tuple[int, int]  # (pipeline rank of the sender, tag)
Expect = Callable[[], None]

_LOOK_AGAIN = 20e-6  # seconds: a short wait is for less than waking up from a long one takes
_AWAKE = 100e-6  # seconds: a wait of less looks all the time, as the shortest sleep may take as long
REMEMBERED = 4096  # messages that have been sent, for a chart of the latest step
_MICROBATCH_BITS, _NUMBER_BITS, _CHECK_BITS = 10, 16, 10


class SentTensor(NamedTuple):
    """A tensor or gradient that has left: when (``time.perf_counter_ns()``), to which rank, of whom."""

    at_ns: int
    target: int
    microbatch: int


class Kind:
    """What a message carries; part of its tag."""

    TENSOR, GRADIENT, NO_GRADIENT, OBJECT, DESCRIPTION, RESULT, ABORT = range(7)


def make_tag(kind: int, microbatch: int, number: int, check: int = 0) -> int:
    """A tag of 39 bits. Numbers may wrap around: messages with one tag keep their order."""
    tag = kind << _MICROBATCH_BITS | (microbatch & ((1 << _MICROBATCH_BITS) - 1))
    tag = tag << _NUMBER_BITS | (number & ((1 << _NUMBER_BITS) - 1))
    return tag << _CHECK_BITS | (check & ((1 << _CHECK_BITS) - 1))


ABORT = make_tag(Kind.ABORT, 0, 0)
_TENSOR_TO_GRADIENT = make_tag(Kind.GRADIENT, 0, 0) - make_tag(Kind.TENSOR, 0, 0)
_GRADIENT_TO_NONE = make_tag(Kind.NO_GRADIENT, 0, 0) - make_tag(Kind.GRADIENT, 0, 0)


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


def gradient_tag(tag: int) -> int:
    """The tag of the gradient of what has the tag of kind TENSOR."""
    return tag + _TENSOR_TO_GRADIENT


def gradient_messages(source: int, tag: int) -> list[Message]:
    """The two messages of which one tells of a gradient."""
    return [(source, tag), (source, _without_gradient(tag))]


def _without_gradient(tag: int) -> int:
    return tag + _GRADIENT_TO_NONE


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
        # By way of wait_any, which also hears that a rank has failed.
        if not self._mailbox.ready(source, tag):
            self.wait_any([(source, tag)])
        return self._mailbox.receive(source, tag, count, dtype)

    def take(
        self, source: int, tag: int, shape: Sequence[int], stride: Sequence[int], dtype: torch.dtype
    ) -> Tensor | None:
        return self._mailbox.take(source, tag, shape, stride, dtype)

    def send_edge(self, sent: Tensor, target: int, tag: int, expect: Expect) -> Tensor:
        return self._mailbox.send_edge(sent, target, tag, _without_gradient(tag), expect)

    def receive_edge(self, received: Tensor, source: int, tag: int) -> tuple[Tensor, Tensor]:
        return self._mailbox.receive_edge(received, source, tag, _without_gradient(tag))

    def send_object(self, target: int, tag: int, value: Any) -> None:
        data = as_bytes(pickle.dumps(value, pickle.HIGHEST_PROTOCOL))  # nobody else reaches the memory
        # The size first: a receiver must say how much it takes.
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
        found = self._mailbox.wait_any([*messages, *self._aborts])
        if found >= len(messages):
            source, tag = self._aborts[found - len(messages)]
            raise PeerFailed(self._receive_object(source, tag))
        return found

    def comes_within(self, messages: Sequence[Message], seconds: float) -> bool:
        end = time.perf_counter() + seconds
        while not any(map(self.ready, messages)):
            left = end - time.perf_counter()
            if left <= 0:
                return False
            if seconds > _AWAKE:
                time.sleep(min(left, _LOOK_AGAIN))
        return True

    def flush(self) -> None:
        self._mailbox.flush()

    def sent(self) -> list[SentTensor]:
        return tensors_among(self._mailbox.sent())

    def require_no_abort(self) -> None:
        for source, tag in self._aborts:
            if self._mailbox.ready(source, tag):
                raise PeerFailed(self._receive_object(source, tag))

    def close(self) -> None:
        pass


class GroupTransport:
    """Over the send and recv of any process group, in the order of the program.

    The two directions between a pair of ranks go over groups of their own, because on an accelerator a send
    holds up its group until it is received. Its messages carry memory of that device: what lies elsewhere is
    copied there first, and whoever receives it copies it back.
    """

    ordered = True

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        members = dist.get_process_group_ranks(group)
        self._members = members
        self._rank = dist.get_rank(group)
        self._device = device
        self._as_bytes = device.type != "cpu"  # NCCL has no complex numbers, and not all integers
        self._leaving: deque[tuple[dist.Work, Tensor]] = deque()
        self._sent: deque[tuple[int, int, int]] = deque(maxlen=REMEMBERED)
        self._up = group
        self._down = group
        if device.type != "cpu":
            self._down = dist.new_group(members, timeout=timeout_of(group), use_local_synchronization=True)

    def send(self, target: int, tag: int, tensor: Tensor) -> None:
        group = self._up if target > self._rank else self._down
        data = sendable(tensor).to(self._device)
        if self._as_bytes:
            data = data.reshape(-1).view(torch.uint8)
        self._forget_what_has_left()
        self._sent.append((time.perf_counter_ns(), target, tag))
        work = dist.isend(data, group=group, tag=_short(tag), group_dst=target)
        assert work is not None
        self._leaving.append((work, data))

    def receive(self, source: int, tag: int, count: int, dtype: torch.dtype) -> Tensor:
        group = self._up if source < self._rank else self._down
        size, kind = (count * dtype.itemsize, torch.uint8) if self._as_bytes else (count, dtype)
        into = torch.empty(size, dtype=kind, device=self._device)
        dist.recv(into, group=group, tag=_short(tag), group_src=source)
        return into.view(dtype)

    def take(
        self, source: int, tag: int, shape: Sequence[int], stride: Sequence[int], dtype: torch.dtype
    ) -> Tensor | None:
        return arranged(self.receive(source, tag, math.prod(shape), dtype), shape, stride)

    def send_edge(self, sent: Tensor, target: int, tag: int, expect: Expect) -> Tensor:
        shape, dtype, device = sent.shape, sent.dtype, sent.device

        def receive() -> Tensor | None:
            expect()
            # Asked first: here nobody can see which of two messages has come.
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
        while self._leaving:
            work, _ = self._leaving.popleft()
            work.wait()

    def _number(self, value: int) -> Tensor:
        """Made on the device, for a copy from the host would wait for all that the device has to do."""
        return torch.full((1,), value, dtype=torch.int64, device=self._device)

    def _forget_what_has_left(self) -> None:
        """Let go of tensors that nobody sends any more: steps that change nothing in place never flush."""
        while self._leaving and self._leaving[0][0].is_completed():
            self._leaving.popleft()

    def sent(self) -> list[SentTensor]:
        return tensors_among(self._sent)

    def require_no_abort(self) -> None:
        pass

    def close(self) -> None:
        pass


def abort(transport: Transport, ranks: Sequence[int], text: str) -> None:
    """Tell the others that this rank has failed, as far as they can still be told."""
    if transport.ordered:
        return  # they may be waiting for anything; the group's timeout ends them
    for rank in ranks:
        with contextlib.suppress(RuntimeError):
            transport.send_object(rank, ABORT, text)


def tensors_among(sent: Iterable[tuple[int, int, int]]) -> list[SentTensor]:
    """Those of the messages, as (time, target, tag), that carry tensors and gradients."""
    tensors = []
    for at, target, tag in sent:
        of_kind, microbatch = divmod(tag >> (_NUMBER_BITS + _CHECK_BITS), 1 << _MICROBATCH_BITS)
        if of_kind in (Kind.TENSOR, Kind.GRADIENT):
            tensors.append(SentTensor(at, target, microbatch))
    return tensors


def _short(tag: int) -> int:
    """Tags have 29 bits between hosts, of which the last two are not for all; torch's have 31.

    Messages of one tag keep their order, so tags may coincide.
    """
    return tag % ((1 << 29) - 3)


def as_bytes(data: bytes) -> Tensor:
    """Memory of its own, which nobody else reaches."""
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)
