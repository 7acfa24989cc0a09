"""Transfers of one microbatch's tensors between ranks, forward as data and backward as gradients.

Everything that is counted (program points, copies, edges) is counted on every rank, whether or not it takes
part, so that all agree without communication.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from opensmd.modelparallel.exceptions import SMPError, SMPUnsupportedError
from opensmd.modelparallel.runtime.backward.backward_pass import BackwardPass
from opensmd.modelparallel.runtime.calls.call import Call
from opensmd.modelparallel.runtime.messages.graph_edges import Origin
from opensmd.modelparallel.runtime.messages.message import (
    Kind,
    Message,
    gradient_messages,
    gradient_tag,
    make_tag,
)
from opensmd.modelparallel.runtime.microbatch import Microbatch
from opensmd.modelparallel.runtime.pipeline_context import PipelineContext
from opensmd.modelparallel.runtime.tensors.memory_layout import in_memory_order, is_sparse, strides_kept
from opensmd.modelparallel.runtime.tensors.tags import Tag, form_of, real_tensor
from opensmd.modelparallel.runtime.turns.turns import Turns

__all__ = ["Transfers"]


class _Copy(NamedTuple):
    """A tensor sent to a rank: after how many changes, at which program point and, there, the copy."""

    changes: int
    number: int
    tensor: Tensor | None


class Transfers:
    """What one microbatch sends and receives.

    Args:
        microbatch: whose tensors these are.
        context: what the microbatches of a pipeline have in common.
        turns: gives the rank to other microbatches while this one waits.
        backward_pass: runs a deferred backward before waiting.
    """

    def __init__(
        self, microbatch: Microbatch, context: PipelineContext, turns: Turns, backward_pass: BackwardPass
    ) -> None:
        self._microbatch = microbatch
        self._context = context
        self._turns = turns
        self._backward_pass = backward_pass
        self._serial = microbatch.serial
        self._rank = context.rank
        self._transport = context.transport
        self._has_sent = False
        self._copies: dict[tuple[Tag, int, bool], _Copy] = {}

    def wait(self, messages: list[Message], until: Callable[[], bool] | None = None) -> None:
        """Let other microbatches run until one of ``messages`` has come, or ``until`` holds."""
        self._turns.at_wait()
        if self._has_come(messages):
            return
        if self._microbatch.deferred is not None:
            # What this microbatch waits for may need gradients from its own backward on another rank.
            self._backward_pass.settle(self._microbatch)
            if self._has_come(messages):
                return
        self._turns.wait(self._microbatch, messages, until)

    def _has_come(self, messages: list[Message]) -> bool:
        return any(map(self._transport.ready, messages))

    def bring_all(self, call: Call, target: int) -> list[Tensor | None]:
        """Bring a call's tensors to rank ``target``; other ranks get None unless a tensor is everywhere."""
        tensors: list[Tensor | None] = []
        for leaf, tag in zip(call.leaves, call.tags, strict=True):
            tensors.append(leaf if tag is None else self.bring(leaf, tag, target))
        return tensors

    def bring(self, tensor: Tensor, tag: Tag | None, target: int) -> Tensor | None:
        """Bring the tensor with this tag to rank ``target``; return None on the others.

        All ranks call this at the same program point.
        """
        if tag is None:
            return tensor
        if tag.serial != self._serial:
            self._microbatch.require_not_later(tag)
        if tag.invalidated is not None:
            raise SMPError(tag.invalidated)
        if tag.home != target:
            return self._transfer(tensor, tag, target)
        if self._rank != target:
            return None
        return tensor if tag.real is None else tag.real

    def release(self) -> None:
        """Release copies from other ranks."""
        self._copies.clear()

    def _transfer(self, tensor: Tensor, tag: Tag, target: int) -> Tensor | None:
        # A copy without a graph cannot replace one with a graph, so whether gradients flow is part of the
        # key.
        grad = tag.requires_grad and torch.is_grad_enabled()
        place, changes = (tag, target, grad), tag.changes
        known = self._copies.get(place)
        # A parameter with a gradient from one backward travels again for another forward and backward.
        if (
            known is not None
            and known.changes == changes
            and not self._microbatch.edges.has_been_passed(known.number)
        ):
            return known.tensor
        # Ranks that neither send nor receive also count, because the numbers are in the messages' tags.
        number = self._microbatch.next_point()
        if grad:
            self._microbatch.edges.count(tag, number)
        copy: Tensor | None = None
        if self._rank == tag.home:
            self._send(real_tensor(tensor), tag, target, number, grad)
        elif self._rank == target:
            copy = self._receive(tensor, tag, number, grad)
        # On every rank, even without a copy: all must agree whether the tensor has to travel again.
        self._copies[place] = _Copy(changes, number, copy)
        return copy

    def _send(self, real: Tensor, tag: Tag, target: int, number: int, grad: bool) -> None:
        # The receiver relies on the tag alone: it would wait for a gradient, or send one that nobody expects.
        if real.requires_grad != tag.requires_grad:
            raise SMPError(
                f"a tensor of shape {tuple(real.shape)} has requires_grad={real.requires_grad}, but the "
                f"other pipeline ranks expect {tag.requires_grad}; do not change it inside a step"
            )
        if is_sparse(real):
            raise SMPUnsupportedError(
                f"a sparse tensor of shape {tuple(real.shape)} was needed on pipeline rank {target} after "
                f"{self._microbatch.point}, but pipeline rank {self._rank} has computed it, and sparse "
                "tensors do not go from one to another. Make it where it is used from dense indices and "
                "values, place both on one partition with smp.set_partition, or pass on tensor.to_dense()"
            )
        if isinstance(real, DTensor):
            raise SMPUnsupportedError(
                f"a distributed tensor of shape {tuple(real.shape)} was needed on pipeline rank {target} "
                f"after {self._microbatch.point}: torch's DTensors do not go between stages. Place the block "
                "that parallelize_module has split whole on one partition with smp.set_partition"
            )
        shape, stride, _ = form_of(real, tag)
        # A detached tensor is not part of the graph, so nothing of this is recorded.
        data = in_memory_order(real.detach(), shape, stride)
        self._has_sent = True
        message = make_tag(Kind.TENSOR, self._microbatch.index, number, _shape_check(shape))
        self._transport.send(target, message, data)
        self._context.sent_since_flush = True
        if grad:
            # The autograd node is created now, at the same program point as the receiver's, so both have the
            # same position in their rank's backward (see graph_edges).
            back = gradient_tag(message)
            messages = gradient_messages(target, back)
            token = self._transport.send_edge(
                real, target, back, lambda: self._wait_for_gradient(messages, shape)
            )
            self._microbatch.edges.leave(number, token, messages)

    def _receive(self, like: Tensor, tag: Tag, number: int, grad: bool) -> Tensor:
        source, (shape, stride, dtype) = tag.home, form_of(like, tag)
        message = (source, make_tag(Kind.TENSOR, self._microbatch.index, number, _shape_check(shape)))
        kept = strides_kept(shape, stride)
        if self._has_sent and self._turns.chunked:
            self._enter_next_chunk(message)
        self._turns.at_wait()
        # Taken if it is there, without asking first: asking costs as much, and a wait would give up the turn.
        received = self._transport.take(*message, shape, kept, dtype)
        while received is None:
            self.wait([message])
            received = self._transport.take(*message, shape, kept, dtype)
        if self._transport.ordered:  # messages between GPUs also move CPU tensors to the GPU
            received = received.to(like.device)
        if not grad:
            return received
        result, token = self._transport.receive_edge(received, source, gradient_tag(message[1]))
        self._microbatch.edges.arrive(number, token, Origin(source, shape))
        return result

    def _enter_next_chunk(self, message: Message) -> None:
        """Enter this rank's next stage, because a tensor that left it has come back."""
        self._has_sent = False
        if self._microbatch.deferred is None:
            self._microbatch.chunk += 1
            self._turns.before_chunk(self._microbatch, [message])

    def _wait_for_gradient(self, messages: list[Message], shape: Sequence[int]) -> None:
        rank = messages[0][0]
        self._microbatch.point = f"the gradient of a tensor of shape {tuple(shape)} from pipeline rank {rank}"
        self.wait(messages)


def _shape_check(shape: Sequence[int]) -> int:
    """Return a few bits of a shape, so that ranks that diverge find no message instead of a wrong one."""
    return hash(shape) & 1023
