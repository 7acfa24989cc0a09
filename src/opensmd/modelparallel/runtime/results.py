"""What microbatches return, made real on every rank of the pipeline."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from opensmd.modelparallel.runtime import structure
from opensmd.modelparallel.runtime.layout import arranged, in_memory_order
from opensmd.modelparallel.runtime.microbatch_run import MicrobatchRun
from opensmd.modelparallel.runtime.shared import Shared
from opensmd.modelparallel.runtime.tags import tag_of
from opensmd.modelparallel.runtime.transport import Kind, make_tag

__all__ = ["Results"]


@dataclass
class _Expected:
    """One microbatch's result; what comes from other ranks is received at the step's end."""

    value: Any = None
    tensors: list[Tensor] = field(default_factory=list)
    coming: list[tuple[int, int, int]] = field(default_factory=list)  # (place, sender, tag)


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
        """Send what this rank has of a microbatch's result to the others, at the microbatch's end."""
        with run.as_a_whole():
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
                    expected.coming.append((place, tag.home, message))
                    continue
                real = run.real(leaf)
                data = in_memory_order(real.detach()).clone()  # the caller may change what it gets
                for rank in self._shared.others:
                    self._shared.transport.send(rank, message, data)
                    self._shared.sent_since_flush = True
                expected.tensors.append(real.detach() if self._detach else real.view_as(real))

    def received(self) -> list[Any]:
        """All results; waits for what is still to come."""
        return [self._complete(each) for each in self._results]

    def _complete(self, expected: _Expected) -> Any:
        tensors = expected.tensors
        for place, sender, message in expected.coming:
            like = tensors[place]
            numbers = self._shared.transport.receive(sender, message, like.numel(), like.dtype)
            tensors[place] = arranged(numbers, like)
        return structure.substitute(expected.value, iter(tensors)) if tensors else expected.value
