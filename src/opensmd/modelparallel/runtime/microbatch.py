"""One microbatch of a step on this rank: who it is and where in the program, for all that work on it.

Its calls, its transfers, its backward and its turns each look at another side of it; this is what they share.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch.overrides import TorchFunctionMode

from opensmd.modelparallel.exceptions import SMPError, SMPUnsupportedError
from opensmd.modelparallel.function_modes._torch_internals import WithoutMode
from opensmd.modelparallel.runtime.backward.deferred import DeferredBackward
from opensmd.modelparallel.runtime.backward.shared_gradients import SharedGradients
from opensmd.modelparallel.runtime.messages.graph_edges import GraphEdges
from opensmd.modelparallel.runtime.tensors.structure import memory_of
from opensmd.modelparallel.runtime.tensors.tags import Tag

__all__ = ["Microbatch"]

_NO_MODE = TorchFunctionMode()


class Microbatch:
    """The state of one microbatch.

    Args:
        index: which one of the step it is.
        begun: how many microbatches earlier steps had.
        borrowed: where tags are noted that a later microbatch than their own has used.
        arguments: of the step function.

    Attributes:
        serial: its number, counted over all steps.
        point: where in the program it is, for messages.
        inside: a module is running as a whole, or a backward: nothing is intercepted.
        mode: the function mode that intercepts its operations.
        deferred: its backward, if that has been called for and has not run.
        leaves_weights: a backward has run, and may have left weight gradients for later.
        edges: where its graph leaves this rank, and comes to it.
        gradients: of tensors that all ranks have.
        functional: how many calls of ``functional_call`` are open.
        chunk: which of the stages of this rank it is in, or comes to next, in its backward as in its forward.
    """

    def __init__(
        self,
        index: int,
        *,
        begun: int = 0,
        borrowed: set[Tag] | None = None,
        arguments: Sequence[Any] = (),
    ) -> None:
        self.index = index
        self._arguments = arguments
        self.serial = begun + index
        self.point = "the beginning of the step function"
        self.inside = False
        self.mode = _NO_MODE
        self.deferred: DeferredBackward | None = None
        self.leaves_weights = False
        self.edges = GraphEdges()
        self.gradients = SharedGradients()
        self.chunk = 0
        self.functional = 0
        self._begun = begun
        self._borrowed: set[Tag] = set() if borrowed is None else borrowed
        self._points = 0

    @property
    def inputs(self) -> frozenset[int]:
        """The memory of the step function's arguments (``untyped_storage()._cdata``)."""
        return memory_of(self._arguments)

    def next_point(self) -> int:
        """The number of this program point; advances alike on all ranks."""
        self._points += 1
        return self._points

    def pass_points(self, count: int) -> None:
        """Go past so many program points at once."""
        self._points += count

    def not_intercepted(self) -> _NotIntercepted:
        """What this thread calls inside is torch's own."""
        return _NotIntercepted(self)

    def require_not_later(self, tag: Tag) -> None:
        """Raise for a tensor of a microbatch that plain PyTorch would run after this one.

        One of an earlier microbatch, of this step or another, is remembered as borrowed.
        """
        if tag.serial > self.serial:
            raise SMPError(
                f"microbatch {self.index} was given, after {self.point}, a tensor that microbatch "
                f"{tag.serial - self._begun} has computed: what kept it (a list or dict that a hook "
                "fills, an object) is shared by all microbatches, which take turns. Return the tensor from "
                "the module, keep it in an attribute of a module, or set active_microbatches to 1"
            )
        if 0 <= tag.serial < self.serial:
            self._borrowed.add(tag)

    def require_gradients_sent(self) -> None:
        """Raise where a gradient has ended on this rank, although what it is of has come from another.

        Backward goes on there for what the loss is known to depend on: modules have arguments for that.

        Raises:
            SMPUnsupportedError: it has.
        """
        for source, shape in self.edges.kept():
            raise SMPUnsupportedError(
                f"microbatch {self.index}: a backward has found a gradient for a tensor of shape "
                f"{tuple(shape)} that pipeline rank {source} has computed, which does not know of it: a "
                "module has got the tensor by another way than its arguments (as an attribute, in an object "
                "or list of the script, in a function). Pass it to the module as an argument"
            )

    def release(self) -> None:
        """Let go of the graph, and of what refers back to this microbatch."""
        self.edges.release()
        self.gradients.release()
        self._arguments = ()
        self.mode = _NO_MODE
        self.deferred = None


class _NotIntercepted:
    """A class of its own, as every backward needs one: contextlib would make a generator each time."""

    __slots__ = ("_inside", "_microbatch", "_without_mode")

    def __init__(self, microbatch: Microbatch) -> None:
        self._microbatch = microbatch
        # Not always False: a backward that waits may have to settle an earlier one first, and then goes on.
        self._inside = microbatch.inside
        self._without_mode = WithoutMode(microbatch.mode)

    def __enter__(self) -> None:
        self._microbatch.inside = True
        self._without_mode.__enter__()

    def __exit__(self, *error: object) -> None:
        self._without_mode.__exit__(*error)
        self._microbatch.inside = self._inside
