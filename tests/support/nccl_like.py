"""Where there is no GPU: a pipeline's messages as NCCL carries them, and backward as CUDA runs it.

What goes wrong on GPUs alone, because the CPU forgives it, goes wrong with this as well. Between two ranks
messages have nothing but an order, the first one of a direction waits for its receiver, and the nodes of a
backward run in a thread of the device's.
"""

from __future__ import annotations

import functools
import queue
import threading
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from opensmd.collectives._torch_internals import timeout_of
from opensmd.modelparallel import _torch_internals
from opensmd.modelparallel.runtime import engine
from opensmd.modelparallel.runtime.backward import backward_pass, weight_gradients
from opensmd.modelparallel.runtime.messages.group_transport import GroupTransport
from opensmd.modelparallel.runtime.turns.thread_state import ThreadState
from opensmd.native import core

__all__ = ["install"]

_MESSAGE, _HEAD, _MEETING = 0, 1, 2  # tags: NCCL has none


class _OnlyInOrder(GroupTransport):
    """Messages that the receiver knows by their place alone; it finds out where they are others."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        super().__init__(group, device)
        self._down = dist.new_group(self._members, timeout=timeout_of(group), use_local_synchronization=True)
        self._met: set[tuple[int, bool]] = set()

    def send(self, target: int, tag: int, tensor: Tensor) -> None:
        upward = target > self._rank
        group = self._up if upward else self._down
        self._meet(group, target, upward)
        head = torch.tensor([tag, tensor.numel() * tensor.element_size()])
        for data, kind in ((head, _HEAD), (tensor.detach().clone().reshape(-1).contiguous(), _MESSAGE)):
            self._outbox.add(dist.isend(data, group=group, tag=kind, group_dst=target), data)

    def receive(self, source: int, tag: int, count: int, dtype: torch.dtype) -> Tensor:
        upward = source < self._rank
        group = self._up if upward else self._down
        self._meet(group, source, upward)
        head, into = torch.empty(2, dtype=torch.int64), torch.empty(count, dtype=dtype)
        dist.recv(head, group=group, tag=_HEAD, group_src=source)
        assert head.tolist() == [tag, into.nbytes], f"{head.tolist()} came instead of {[tag, into.nbytes]}"
        dist.recv(into, group=group, tag=_MESSAGE, group_src=source)
        return into

    def _meet(self, group: dist.ProcessGroup, other: int, upward: bool) -> None:
        """Both ends make NCCL's communicator at the first message of a direction."""
        if (other, upward) in self._met:
            return
        self._met.add((other, upward))
        mine, others = torch.zeros(1), torch.zeros(1)
        sent = dist.isend(mine, group=group, tag=_MEETING, group_dst=other)
        dist.recv(others, group=group, tag=_MEETING, group_src=other)
        assert sent is not None
        sent.wait()


class _DeviceThread:
    """The only thread in which backward runs, with the modes of the thread that has called it."""

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._live, daemon=True, name="device of autograd")
        self._thread.start()

    def run(self, job: Callable[[], None]) -> None:
        if threading.current_thread() is self._thread:  # a backward inside a backward
            job()
            return
        state, done, errors = ThreadState.of_this_thread(), threading.Event(), []

        def with_state() -> None:
            try:
                with state.restored():
                    job()
            except BaseException as error:
                errors.append(error)
            done.set()

        self._jobs.put(with_state)
        done.wait()
        if errors:
            raise errors[0]

    def _live(self) -> None:
        while True:
            self._jobs.get()()


class _SplitInDeviceThread:
    """A backward in two parts, both of which run there."""

    def __init__(self, split: core.SplitBackward, thread: _DeviceThread) -> None:
        self._split, self._thread = split, thread

    @property
    def leaves_everything(self) -> bool:
        return self._split.leaves_everything

    def run_first(self) -> None:
        self._thread.run(self._split.run_first)

    def run_weights(self) -> None:
        self._thread.run(self._split.run_weights)


@functools.cache
def install() -> None:
    """From now on, in this process."""
    thread = _DeviceThread()
    plain_backward, plain_split = _torch_internals.run_backward, weight_gradients.first_part

    def run_backward(*args: Any, **kwargs: Any) -> None:
        thread.run(lambda: plain_backward(*args, **kwargs))

    def first_part(*args: Any, **kwargs: Any) -> Any:
        split = plain_split(*args, **kwargs)
        return None if split is None else _SplitInDeviceThread(split, thread)

    for module, name, instead in (
        (backward_pass, "run_backward", run_backward),
        (backward_pass, "first_part", first_part),
        (engine, "open_transport", _OnlyInOrder),
    ):
        setattr(module, name, instead)
