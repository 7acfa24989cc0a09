"""The backwards of one step on this rank: where they start, when they run, and in how many parts.

``model.backward(loss)`` is called on every rank at one program point. Then, on each rank::

    begin ── nothing of the graph is here ─────────────────────── others may go first, and that is all
      │
      ├── its gradient has come, or it may not be deferred ────── others may go first, then it runs
      │
      └── its gradient is on its way ── deferred ──┬── the function goes on with something that might
                                                   │   notice: settle, it runs before that
                                                   └── the function returns: run_deferred, when
                                                       its gradient has come

If possible, a backward runs in two parts; the second computes weight gradients when the schedule has them, or
the rank has nothing else to do (:mod:`.weight_gradients`). If microbatches pass this rank several times, each
pass is a separate leg that starts when its gradient has arrived.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, Protocol

from torch import Tensor

from opensmd.modelparallel._torch_internals import any_modes, run_backward
from opensmd.modelparallel.exceptions import SMPError
from opensmd.modelparallel.replicas.backward_count import Backwards
from opensmd.modelparallel.runtime.backward.deferred import DeferredBackward, Leg
from opensmd.modelparallel.runtime.backward.roots import latest_first, root_gradient, root_pairs
from opensmd.modelparallel.runtime.backward.weight_gradients import (
    WeightGradients,
    are_apart,
    first_part,
)
from opensmd.modelparallel.runtime.messages.message import Message
from opensmd.modelparallel.runtime.microbatch import Microbatch
from opensmd.modelparallel.runtime.pipeline_context import PipelineContext
from opensmd.modelparallel.runtime.tensors.tags import tags_of
from opensmd.modelparallel.runtime.turns.record import Record
from opensmd.modelparallel.runtime.turns.thread_state import without_autocast
from opensmd.modelparallel.runtime.turns.turns import Turns

__all__ = ["BackwardPass", "Reducer"]


class Reducer(Protocol):
    """Averages the gradients of this rank's stage over the replicas, during the step's last backward."""

    def before_last_backward(self, roots: Sequence[Tensor]) -> None:
        """Prepare for the last backward, from ``roots``, which are all that this rank has."""

    def after_backward(self) -> None:
        """Note that a microbatch's backward has returned."""


class DeferredAttributes(Protocol):
    """What each microbatch of a step has in its modules."""

    def defer(self, microbatch: int) -> None:
        """Keep what its backward is to find, which is deferred."""

    def begin_backward(self, microbatch: int) -> None:
        """Begin a part of a deferred backward."""

    def end_backward(self, microbatch: int, *, is_last: bool) -> None:
        """End a part of a deferred backward; ``is_last``: there is no other."""


class BackwardPass:
    """The backwards of one step.

    Args:
        context: what the microbatches of a pipeline have in common.
        turns: decides which microbatch runs.
        weight_gradients: takes the second parts of backwards.
        record: notes what ran when.
        counts: counts the started backwards.
        splits_from: microbatches from this one on leave their weight gradients for later.
        in_order: whether all ranks do everything in one order, so nothing is deferred.
        reducer: that of the replicas; None without them.
        attributes: those of the step.
    """

    def __init__(
        self,
        context: PipelineContext,
        turns: Turns,
        weight_gradients: WeightGradients,
        record: Record,
        counts: Backwards,
        *,
        splits_from: int,
        in_order: bool,
        reducer: Reducer | None,
        attributes: DeferredAttributes,
    ) -> None:
        self._counts = counts
        self._context = context
        self._turns = turns
        self._weight_gradients = weight_gradients
        self._record = record
        self._splits_from = splits_from
        self._in_order = in_order
        self._reducer = reducer
        self._attributes = attributes

    def begin(
        self,
        microbatch: Microbatch,
        tensors: Tensor | Sequence[Tensor],
        grad_tensors: Tensor | Sequence[Tensor | None] | None = None,
        retain_graph: bool | None = None,
        create_graph: bool = False,
        inputs: Any = None,
        *,
        share: float | None = None,
    ) -> None:
        """Run ``torch.autograd.backward`` over all ranks, for the calling thread's microbatch.

        Args:
            share: the factor for gradients; None if the script calls torch's own backward.

        Raises:
            SMPError: ``create_graph`` or ``inputs`` is given, which would span ranks.
        """
        if create_graph or inputs is not None:
            raise SMPError("backward inside a smp.step function takes neither create_graph nor inputs")
        if share is None:
            self._context.sum_warning.plain_backward(self._counts.microbatches)
        roots, gradients = root_pairs(tensors, grad_tensors)
        with microbatch.not_intercepted():
            self._begin(microbatch, roots, gradients, bool(retain_graph), 1.0 if share is None else share)

    def settle(self, microbatch: Microbatch) -> None:
        """Run the rest of a microbatch's backward before its function continues.

        Called before anything runs on this rank that might see its gradients or change what they are computed
        from, and before the function waits.
        """
        backward, microbatch.deferred = microbatch.deferred, None
        if backward is not None:
            # It was requested outside autocast, or it would not have been deferred.
            with microbatch.not_intercepted(), without_autocast():
                while backward.legs:
                    self._turns.before_backward(microbatch, backward.awaited)
                    self._run_in_function(microbatch, backward)
        if microbatch.leaves_weights:
            microbatch.leaves_weights = False
            if self._weight_gradients.of(microbatch.index):
                self._complete(microbatch)

    def run_deferred(self, microbatch: Microbatch) -> None:
        """Run a leg of the microbatch's deferred backward, if any, after its function has returned."""
        backward, microbatch.deferred = microbatch.deferred, None
        if backward is not None:
            self._run(microbatch, backward)
            if backward.legs:
                microbatch.deferred = backward

    def complete_gradients(self, microbatch: Microbatch) -> None:
        """Compute pending gradients, because something in ``microbatch`` is about to read them."""
        if self._weight_gradients:
            with microbatch.not_intercepted(), self._record.interrupted():
                self._weight_gradients.run_all()
            if self._reducer is not None:
                self._reducer.after_backward()

    def _complete(self, microbatch: Microbatch) -> None:
        """Compute what a microbatch has left, because what it needs is about to change."""
        if self._reducer_of_last(microbatch.index) is not None:
            self.complete_gradients(microbatch)
            return
        with microbatch.not_intercepted(), self._record.interrupted():
            for chunk in self._weight_gradients.of(microbatch.index):
                self._weight_gradients.run(microbatch.index, chunk)

    def _begin(
        self,
        microbatch: Microbatch,
        roots: Sequence[Tensor],
        grad_tensors: Sequence[Tensor | None],
        retain_graph: bool,
        share: float,
    ) -> None:
        self._turns.at_backward(microbatch)
        self.settle(microbatch)
        tags = tags_of(roots)
        if None in tags:
            self._context.escaped.require_replicated(roots, tags, microbatch.point)
        microbatch.gradients.before_backward(tags, is_first=self._context.rank == 0)
        self._counts.add(microbatch.index)
        own: list[Tensor] = []
        gradients: list[Tensor] = []
        for root, gradient, tag in zip(roots, grad_tensors, tags, strict=True):
            if tag is not None:
                microbatch.require_not_later(tag)
            if tag is None or tag.home == self._context.rank:
                real = root if tag is None or tag.real is None else tag.real
                own.append(real)
                gradients.append(root_gradient(real, gradient, share))
        backward = DeferredBackward(self._legs(microbatch, roots, own, gradients, retain_graph), retain_graph)
        if not backward.legs:  # nothing to do here, but microbatches take turns as on ranks with work
            self._turns.before_backward(microbatch, [])
            return
        self._run_or_defer(microbatch, backward)

    def _legs(
        self,
        microbatch: Microbatch,
        roots: Sequence[Tensor],
        own: list[Tensor],
        gradients: list[Tensor],
        retain_graph: bool,
    ) -> list[Leg]:
        """Return the legs of a backward from ``own`` roots and tokens; none if there are neither."""
        edges = microbatch.edges.behind(roots, keep=retain_graph)
        starts = microbatch.edges.tokens(edges, keep=retain_graph)
        if self._turns.chunked and self._may_defer(microbatch.index, retain_graph):
            tokens = dict(zip(edges, starts, strict=True))
            legs: list[Leg] = []
            for numbers in microbatch.edges.legs(edges):
                mine, theirs = ([], []) if legs else (own, gradients)
                awaited = [] if mine else microbatch.edges.first_gradient(numbers[:1])
                these = [tokens[number] for number in numbers]
                legs.append(Leg([*mine, *these], [*theirs, *these], awaited))
            legs = [leg for leg in legs if leg.roots]
            if len(legs) < 2 or are_apart([leg.roots for leg in legs], weights_too=self._reducer is not None):
                return legs
        # With its own root, this rank has work at once; otherwise its first node is that of the latest edge.
        awaited = [] if own else microbatch.edges.first_gradient(edges)
        whole = Leg([*own, *starts], [*gradients, *starts], awaited)  # tokens have no elements
        if self._in_order:
            whole.roots, whole.gradients = latest_first(whole.roots, whole.gradients)
        return [whole] if whole.roots else []

    def _run_or_defer(self, microbatch: Microbatch, backward: DeferredBackward) -> None:
        awaited: list[Message] = backward.awaited
        if not self._may_defer(microbatch.index, backward.retain_graph):
            self._turns.before_backward(microbatch, awaited)
        elif not self._turns.is_first(microbatch, awaited):
            # Giving up the turn here would occupy this stack and its thread until the gradient comes.
            self._defer(microbatch, backward)
            return
        self._run_in_function(microbatch, backward)
        if backward.legs:
            self._defer(microbatch, backward)

    def _defer(self, microbatch: Microbatch, backward: DeferredBackward) -> None:
        microbatch.deferred = backward
        self._attributes.defer(microbatch.index)

    def _may_defer(self, index: int, retain_graph: bool) -> bool:
        """Whether a backward may run after the user's function has returned.

        Not within modes that the function may leave, nor if everything has a fixed order.
        """
        return not (
            retain_graph
            or self._in_order
            or self._reducer_of_last(index) is not None
            or self._counts.microbatches == 1
            or any_modes()
        )

    def _run_in_function(self, microbatch: Microbatch, backward: DeferredBackward) -> None:
        self._record.turn("backward")
        self._run(microbatch, backward)
        self._record.turn("forward")

    def _run(self, microbatch: Microbatch, backward: DeferredBackward) -> None:
        """Run the next leg."""
        leg = backward.legs.pop(0)
        self._attributes.begin_backward(microbatch.index)
        self._run_leg(microbatch, leg, backward.retain_graph)
        self._attributes.end_backward(microbatch.index, is_last=not backward.legs)
        if microbatch.chunk:
            microbatch.chunk -= 1

    def _run_leg(self, microbatch: Microbatch, leg: Leg, retain_graph: bool) -> None:
        index, chunk = microbatch.index, microbatch.chunk
        reducer = self._reducer_of_last(index)
        # A retained graph cannot be split: its second part would run again with the next backward.
        splits = index >= self._splits_from and not retain_graph
        split = first_part(leg.roots, leg.gradients, everything=reducer is not None) if splits else None
        if split is not None and reducer is not None and split.leaves_everything:
            arm = partial(reducer.before_last_backward, leg.roots)
            self._weight_gradients.run_first(index, chunk, split, before_all=arm)
            microbatch.leaves_weights = True
            return
        if reducer is not None:
            # The reducer sends a bucket when the backward has passed its parameters; by then the other
            # microbatches' gradients must be in it.
            self.complete_gradients(microbatch)
            reducer.before_last_backward(leg.roots)
        if split is not None:
            self._weight_gradients.run_first(index, chunk, split)  # the reducer waits for it
            microbatch.leaves_weights = True
            return
        run_backward(leg.roots, leg.gradients, retain_graph=retain_graph)
        if reducer is not None:
            reducer.after_backward()

    def _reducer_of_last(self, index: int) -> Reducer | None:
        """Return the reducer, if replicas may reduce gradients in a backward of this microbatch."""
        return self._reducer if self._reducer is not None and self._counts.may_be_last(index) else None
