"""One microbatch of a step on this rank: its identity and its position in the program.

Calls, transfers, backward and turns each handle another aspect of it; this is what they share.
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
        index: its number in the step.
        begun: the number of microbatches in earlier steps.
        borrowed: collects tags used by a later microbatch than their own.
        arguments: those of the step function.

    Attributes:
        serial: its number over all steps.
        point: its position in the program, for messages.
        inside: whether a module runs as a whole, or a backward, so nothing is intercepted.
        mode: the function mode that intercepts its operations.
        deferred: its backward, if requested but not run yet.
        leaves_weights: whether a backward has run that may have left weight gradients for later.
        edges: where its graph leaves this rank and comes back.
        gradients: those of tensors that all ranks have.
        functional: the number of open calls of ``functional_call``.
        chunk: which of this rank's stages it is in, or enters next, in forward or backward.
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

    @property
    def place(self) -> tuple[int, str]:
        """Its position in the program: how many points it has passed, and at which call it is."""
        return self._points, self.point

    def next_point(self) -> int:
        """Return the number of this program point and advance, alike on all ranks."""
        self._points += 1
        return self._points

    def pass_points(self, count: int) -> None:
        """Skip so many program points."""
        self._points += count

    def not_intercepted(self) -> _NotIntercepted:
        """Do not intercept what this thread calls inside."""
        return _NotIntercepted(self)

    def require_not_later(self, tag: Tag) -> None:
        """Raise for a tensor of a microbatch that plain PyTorch would run after this one.

        A tensor of an earlier microbatch, of this step or another, is noted as borrowed.
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
        """Raise if a gradient has ended on this rank although its tensor came from another.

        Backward continues there only for known dependencies of the loss, which are the arguments of modules.

        Raises:
            SMPUnsupportedError: such a gradient is here.
        """
        for source, shape in self.edges.kept():
            raise SMPUnsupportedError(
                f"microbatch {self.index}: a backward has found a gradient for a tensor of shape "
                f"{tuple(shape)} that pipeline rank {source} has computed, which does not know of it: a "
                "module has got the tensor by another way than its arguments (as an attribute, in an object "
                "or list of the script, in a function). Pass it to the module as an argument"
            )

    def release(self) -> None:
        """Release the graph, and what refers back to this microbatch."""
        self.edges.release()
        self.gradients.release()
        self._arguments = ()
        self.mode = _NO_MODE
        self.deferred = None


class _NotIntercepted:
    """A class, because every backward needs one, and contextlib would create a generator each time."""

    __slots__ = ("_inside", "_microbatch", "_without_mode")

    def __init__(self, microbatch: Microbatch) -> None:
        self._microbatch = microbatch
        # Not always False: a waiting backward may have to settle an earlier one first, and then continues.
        self._inside = microbatch.inside
        self._without_mode = WithoutMode(microbatch.mode)

    def __enter__(self) -> None:
        self._microbatch.inside = True
        self._without_mode.__enter__()

    def __exit__(self, *error: object) -> None:
        self._without_mode.__exit__(*error)
        self._microbatch.inside = self._inside
