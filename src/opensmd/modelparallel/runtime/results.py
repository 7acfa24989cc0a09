"""What microbatches return, made real on every rank of the pipeline."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from opensmd.modelparallel.runtime import structure
from opensmd.modelparallel.runtime.layout import in_memory_order, strides_kept
from opensmd.modelparallel.runtime.microbatch_run import MicrobatchRun
from opensmd.modelparallel.runtime.shared import Shared
from opensmd.modelparallel.runtime.tags import Form, form_of, tag_of
from opensmd.modelparallel.runtime.transport import Kind, make_tag

__all__ = ["Results"]


@dataclass
class _Expected:
    """One microbatch's result; what comes from other ranks is received at the step's end."""

    value: Any = None
    tensors: list[Tensor] = field(default_factory=list)
    coming: list[tuple[int, int, int, Form]] = field(default_factory=list)  # (place, sender, tag, form)


class Results:
    """The results of one step.

    Args:
        shared: the pipeline.
        count: of microbatches.
        detach: detach what is returned from its graph.
    """

    def __init__(self, shared: Shared, count: int, *, detach: bool) -> None:
        self._shared = shared
        self._detach = detach
        self._results = [_Expected() for _ in range(count)]

    def share(self, run: MicrobatchRun, value: Any) -> None:
        """Send what this rank has of a microbatch's result to the others, after the microbatch's end."""
        expected = self._results[run.index]
        expected.value = value
        leaves: list[Tensor] = []
        structure.collect(value, leaves)
        for place, leaf in enumerate(leaves):
            tag = tag_of(leaf)
            if tag is None:
                expected.tensors.append(leaf.detach() if self._detach else leaf)
                continue
            message = make_tag(Kind.RESULT, run.index, place)
            if tag.home != self._shared.rank:
                expected.tensors.append(leaf)
                expected.coming.append((place, tag.home, message, form_of(leaf, tag)))
                continue
            real = run.real(leaf)
            detached = real.detach()
            shape, stride, _ = form_of(real, tag)
            data = in_memory_order(detached, shape, stride).clone()  # the caller may change what it gets
            for rank in self._shared.others:
                self._shared.transport.send(rank, message, data)
                self._shared.sent_since_flush = True
            expected.tensors.append(detached if self._detach else real.view_as(real))

    def received(self) -> list[Any]:
        """All results; waits for what is still to come."""
        return [self._complete(each) for each in self._results]

    def _complete(self, expected: _Expected) -> Any:
        tensors = expected.tensors
        for place, sender, message, (shape, stride, dtype) in expected.coming:
            numbers = self._shared.transport.receive(sender, message, math.prod(shape), dtype)
            kept = strides_kept(shape, stride)
            tensors[place] = numbers.as_strided(shape, kept) if kept else numbers.view(shape)
        return structure.substitute(expected.value, iter(tensors)) if tensors else expected.value
