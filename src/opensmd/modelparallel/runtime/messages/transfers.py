"""Tensors of one microbatch on their way between ranks, forward as data and backward as gradients.

Everything that counts (program points, copies, edges) counts on every rank, whether or not the rank takes
part, so that all agree without a word.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from opensmd.modelparallel.exceptions import SMPError, SMPUnsupportedError
from opensmd.modelparallel.runtime.calls.call import Call
from opensmd.modelparallel.runtime.messages.transport import Kind, Message, gradient_messages, make_tag
from opensmd.modelparallel.runtime.pipeline_context import PipelineContext
from opensmd.modelparallel.runtime.tensors.memory_layout import in_memory_order, is_sparse, strides_kept
from opensmd.modelparallel.runtime.tensors.tags import Tag, ancestors, form_of, tag_of, tags_of

__all__ = ["Transfers"]


class Transfers:
    """What one microbatch sends and receives.

    Args:
        context: what the microbatches of a pipeline have in common.
        index: which microbatch this is.

    Attributes:
        point: where in the program it is, for messages.
        serial: its number, counted over all steps.
    """

    def __init__(self, context: PipelineContext, index: int) -> None:
        self.context = context
        self.index = index
        self.serial = context.begun + index
        self.rank = context.rank
        self.transport = context.transport
        self.point = "the beginning of the step function"
        self._counter = 0
        self._copies: dict[tuple[Tag, int, bool], tuple[int, Tensor | None]] = {}
        self._edges: dict[Tag, list[int]] = {}
        self._tokens: dict[int, Tensor | None] = {}
        self._gradients: dict[int, list[Message]] = {}

    def next_point(self) -> int:
        """The number of this program point; advances alike on all ranks."""
        self._counter += 1
        return self._counter

    def wait(self, messages: list[Message], until: Callable[[], bool] | None = None) -> None:
        """Let other microbatches go on until one of ``messages`` has come, or ``until`` holds."""
        for message in messages:
            if self.transport.ready(message):
                return
        self.context.wait(self.index, messages, until)

    def real(self, tensor: Tensor) -> Tensor:
        """At its home, the tensor that has the data."""
        tag = tag_of(tensor)
        return tensor if tag is None or tag.real is None else tag.real

    def bring_all(self, call: Call, target: int) -> list[Tensor | None]:
        """The tensors of a call on rank ``target``; None on other ranks for those that are not everywhere."""
        return [self.bring(leaf, tag, target) for leaf, tag in zip(call.leaves, call.tags, strict=True)]

    def bring(self, tensor: Tensor, tag: Tag | None, target: int) -> Tensor | None:
        """The tensor with this tag on rank ``target``: None on the others.

        All ranks call it at the same program point.
        """
        if tag is None:
            return tensor
        if tag.serial != self.serial:
            self.require_not_later(tag)
        if tag.invalidated is not None:
            raise SMPError(tag.invalidated)
        if tag.home != target:
            return self._transfer(tensor, tag, target)
        if self.rank != target:
            return None
        return tensor if tag.real is None else tag.real

    def require_not_later(self, tag: Tag) -> None:
        """Raise for a tensor of a microbatch that plain PyTorch would run after this one.

        One of an earlier microbatch of the step is remembered as borrowed.
        """
        if tag.serial > self.serial:
            raise SMPError(
                f"microbatch {self.index} was given, after {self.point}, a tensor that microbatch "
                f"{tag.serial - self.context.begun} has computed: what kept it (a list or dict that a hook "
                "fills, an object) is one for all microbatches, and they take turns. Return the tensor from "
                "the module, keep it in an attribute of a module, or set active_microbatches to 1"
            )
        if self.context.begun <= tag.serial < self.serial:
            self.context.borrowed.add(tag)

    def _transfer(self, tensor: Tensor, tag: Tag, target: int) -> Tensor | None:
        grad = tag.requires_grad and torch.is_grad_enabled()
        place, changes = (tag, target, grad), tag.changes
        known = self._copies.get(place)
        if known is not None and known[0] == changes:
            return known[1]
        number = self.next_point()
        if grad:
            self._edges.setdefault(tag, []).append(number)
        copy: Tensor | None = None
        if self.rank == tag.home:
            self._send(self.real(tensor), tag, target, number, grad)
        elif self.rank == target:
            copy = self._receive(tensor, tag, number, grad)
        self._copies[place] = (changes, copy)
        return copy

    def _send(self, real: Tensor, tag: Tag, target: int, number: int, grad: bool) -> None:
        if real.requires_grad != tag.requires_grad:
            raise SMPError(
                f"a tensor of shape {tuple(real.shape)} has requires_grad={real.requires_grad}, but the "
                f"other pipeline ranks were told {tag.requires_grad}; do not change it inside a step"
            )
        if is_sparse(real):
            raise SMPUnsupportedError(
                f"a sparse tensor of shape {tuple(real.shape)} was needed on pipeline rank {target} after "
                f"{self.point}, but pipeline rank {self.rank} has computed it, and sparse tensors do not go "
                "from one to another. Make it where it is used from dense indices and values, place both on "
                "one partition with smp.set_partition, or hand on tensor.to_dense()"
            )
        shape, stride, _ = form_of(real, tag)
        check = _shape_check(shape)
        # A detached tensor is no part of the graph, so that nothing of this is recorded.
        data = in_memory_order(real.detach(), shape, stride)
        self.transport.send(target, make_tag(Kind.TENSOR, self.index, number, check), data)
        self.context.sent_since_flush = True
        if grad:
            back = make_tag(Kind.GRADIENT, self.index, number, check)
            messages = gradient_messages(target, back)
            self._gradients[number] = messages
            self._tokens[number] = self.transport.send_edge(
                real, target, back, lambda: self._wait_for_gradient(messages, shape)
            )

    def _receive(self, like: Tensor, tag: Tag, number: int, grad: bool) -> Tensor:
        source, (shape, stride, dtype) = tag.home, form_of(like, tag)
        check = _shape_check(shape)
        message = (source, make_tag(Kind.TENSOR, self.index, number, check))
        kept = strides_kept(shape, stride)
        received = self.transport.take(*message, shape, kept, dtype)
        while received is None:
            self.wait([message])
            received = self.transport.take(*message, shape, kept, dtype)
        if not grad:
            return received
        back = make_tag(Kind.GRADIENT, self.index, number, check)
        result, self._tokens[number] = self.transport.receive_edge(received, source, back)
        return result

    def _wait_for_gradient(self, messages: list[Message], shape: Sequence[int]) -> None:
        self.point = f"the gradient of a tensor of shape {tuple(shape)} from pipeline rank {messages[0][0]}"
        self.wait(messages)

    # --- backward --------------------------------------------------------------------------------------

    def edges_of(self, roots: Sequence[Tensor]) -> list[int]:
        """The edges at this rank that ``roots`` depend on, in order of creation."""
        if not self._tokens:
            return []
        ancestry = ancestors([tag for tag in tags_of(roots) if tag is not None])
        found = []
        for tag, numbers in self._edges.items():
            if tag in ancestry:
                found += [number for number in numbers if number in self._tokens]
        found.sort()
        return found

    def tokens(self, edges: Sequence[int], *, keep: bool) -> list[Tensor]:
        """The tokens of edges, which backward begins at.

        Raises:
            RuntimeError: backward has been through one of them already.
        """
        found = []
        for number in edges:
            token = self._tokens[number]
            if token is None:
                raise RuntimeError(
                    "Trying to backward through the graph a second time: specify retain_graph=True in the "
                    "first backward of this microbatch"
                )
            found.append(token)
            if not keep:
                self._tokens[number] = None
        return found

    def first_gradient(self, edges: Sequence[int]) -> list[Message]:
        """The messages of which the latest edge waits for one, if that edge is a sent tensor's."""
        return self._gradients.get(edges[-1], []) if edges else []

    def release(self) -> None:
        """Let go of copies, tokens and tags."""
        self._copies.clear()
        self._tokens.clear()
        self._edges.clear()
        self._gradients.clear()


def _shape_check(shape: Sequence[int]) -> int:
    return hash(shape) & 1023
