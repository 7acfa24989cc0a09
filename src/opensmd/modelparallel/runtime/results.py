"""Making the results of microbatches real on every rank of the pipeline.

Nobody reads results before the end of the step. Small ones, such as losses, travel then, all of a rank
together; large ones travel at once, if messages may overtake each other.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from opensmd.modelparallel.exceptions import SMPError, SMPUnsupportedError
from opensmd.modelparallel.runtime.messages.message import Kind, make_tag
from opensmd.modelparallel.runtime.pipeline_context import PipelineContext
from opensmd.modelparallel.runtime.tensors import structure
from opensmd.modelparallel.runtime.tensors.memory_layout import (
    arranged,
    in_memory_order,
    is_sparse,
    strides_kept,
)
from opensmd.modelparallel.runtime.tensors.tags import Form, form_of, tags_of

__all__ = ["Results"]

# A message costs about as much as copying this many bytes.
_SMALL_BYTES = 4096


class _ResultPart(NamedTuple):
    """A tensor in a result. Parts sort by microbatch and place, alike on all ranks.

    Attributes:
        place: its index among the tensors of the microbatch's result.
        elements: how many elements it has.
        is_small: whether it travels together with others.
        device: where the program has it, which a message between GPUs does not say.
        data: at its home, the tensor itself.
    """

    microbatch: int
    place: int
    elements: int
    is_small: bool
    form: Form
    device: torch.device
    data: Tensor | None

    @property
    def is_number(self) -> bool:
        """Whether it is 0-dimensional, such as a loss."""
        return not self.form[0]

    def leaving(self) -> Tensor:
        """Return the part's elements as they travel."""
        assert self.data is not None
        shape, stride, _ = self.form
        return in_memory_order(self.data, shape, stride).reshape(-1)

    def arrived(self, numbers: Tensor) -> Tensor:
        """Return the tensor from the received elements."""
        shape, stride, _ = self.form
        return arranged(numbers, shape, strides_kept(shape, stride)).to(self.device)


class _Ended(torch.autograd.Function):
    """The end of a result's graph: that is spread over the ranks, and ends with the step on all of them."""

    @staticmethod
    def forward(ctx: Any, graph: Tensor, result: Tensor) -> Tensor:
        return result.view_as(result)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        raise SMPError(
            "backward was called after the step on a tensor that a smp.step function returned. Its graph is "
            "spread over the partitions, which go through it together inside the step: call model.backward "
            "there"
        )


class Results:
    """The results of one step.

    Args:
        context: the pipeline.
        count: the number of microbatches.
        detach: detach results from their graphs. Otherwise they require gradients on all ranks, and a
            backward raises an error that it belongs inside the step.
    """

    def __init__(self, context: PipelineContext, count: int, *, detach: bool) -> None:
        self._context = context
        self._detach = detach
        self._values: list[Any] = [None] * count
        self._tensors: list[list[Tensor]] = [[] for _ in range(count)]
        self._parts: list[list[_ResultPart]] = [[] for _ in range(context.size)]  # by home
        self._in_graphs: list[tuple[int, int]] = []  # microbatch and place of parts with a graph

    def share(self, index: int, value: Any) -> None:
        """Add what microbatch ``index`` has returned."""
        context = self._context
        self._values[index] = value
        tensors = self._tensors[index]
        structure.collect(value, tensors)
        tags = tags_of(tensors)
        if None in tags:
            context.escaped.require_replicated(tensors, tags, "the step function has returned")
        for place, (leaf, tag) in enumerate(zip(tensors, tags, strict=True)):
            # Computed on all ranks, so there is nothing to send.
            if tag is None:
                tensors[place] = leaf.detach() if self._detach else leaf
                continue
            data: Tensor | None = None
            if tag.home == context.rank:
                tensors[place] = data = (leaf if tag.real is None else tag.real).detach()
                if is_sparse(data):
                    raise SMPUnsupportedError(
                        f"microbatch {index} returned a sparse tensor of shape {tuple(data.shape)} from the "
                        f"step, which pipeline rank {context.rank} has computed, and sparse tensors do not "
                        "go from one to another. Return tensor.to_dense()"
                    )
            form = form_of(leaf, tag)
            elements = math.prod(form[0])
            is_small = elements * form[2].itemsize <= _SMALL_BYTES
            part = _ResultPart(index, place, elements, is_small, form, leaf.device, data)
            self._parts[tag.home].append(part)
            # From the tag, which all ranks know: on a rank without the data, nothing requires gradients.
            if tag.requires_grad and not self._detach:
                self._in_graphs.append((index, place))
            if data is not None and not is_small and not context.transport.ordered:
                self._send(part, part.leaving().clone())  # the caller may change the original

    def _send(self, first: _ResultPart, numbers: Tensor) -> None:
        for rank in self._context.others:
            self._context.transport.send(rank, _tag(first), numbers)

    def received(self) -> list[Any]:
        """Wait for outstanding results and return all."""
        for home, parts in enumerate(self._parts):
            if not parts:
                continue
            # Microbatches end in different orders on the ranks, but messages must be composed alike.
            parts.sort()
            for together in _messages(parts):
                if home != self._context.rank:
                    self._receive(home, together)
                elif self._context.transport.ordered or together[0].is_small:
                    self._send(together[0], _joined(together))
        for microbatch, place in self._in_graphs:
            tensors = self._tensors[microbatch]
            # Something that requires gradients, so that autograd creates a node that can respond.
            graph = torch.empty(0, device="cpu", requires_grad=True)
            tensors[place] = _Ended.apply(graph, tensors[place])  # type: ignore[no-untyped-call]
        return [
            structure.substitute(value, iter(tensors)) if tensors else value
            for value, tensors in zip(self._values, self._tensors, strict=True)
        ]

    def _receive(self, home: int, together: list[_ResultPart]) -> None:
        counts = [part.elements for part in together]
        first = together[0]
        numbers = self._context.transport.receive(home, _tag(first), sum(counts), first.form[2])
        for part, tensor in zip(together, _apart(together, numbers, counts), strict=True):
            self._tensors[part.microbatch][part.place] = tensor


def _messages(parts: list[_ResultPart]) -> list[list[_ResultPart]]:
    """Return what travels together: small parts by dtype and kind of device; others travel alone."""
    small: dict[tuple[torch.dtype, str], list[_ResultPart]] = {}
    alone: list[list[_ResultPart]] = []
    for part in parts:
        if part.is_small:
            small.setdefault((part.form[2], part.device.type), []).append(part)
        else:
            alone.append([part])
    # By dtype, because torch.cat promotes: an integer among floats would arrive rounded.
    return [*small.values(), *alone]


def _joined(together: list[_ResultPart]) -> Tensor:
    """Join the elements that travel together; for losses, the usual case, in one operation."""
    numbers = [part.data for part in together if part.is_number and part.data is not None]
    if len(numbers) == len(together):
        return torch.stack(numbers)
    return torch.cat([part.leaving() for part in together])


def _apart(together: list[_ResultPart], numbers: Tensor, counts: list[int]) -> Sequence[Tensor]:
    """Split a received vector into tensors; the reverse of :func:`_joined`."""
    if all(part.is_number for part in together):
        return numbers.to(together[0].device).unbind()
    pieces = torch.split(numbers, counts)
    return [part.arrived(piece) for part, piece in zip(together, pieces, strict=True)]


def _tag(first: _ResultPart) -> int:
    """Return the tag of a message that starts with this part."""
    return make_tag(Kind.RESULT, first.microbatch, first.place)
