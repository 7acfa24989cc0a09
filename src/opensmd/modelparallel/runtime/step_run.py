"""One step: everything that lives from the call of the step function to its results."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from opensmd.modelparallel.replicas.backward_count import Backwards
from opensmd.modelparallel.runtime.backward.backward_pass import BackwardPass, Reducer
from opensmd.modelparallel.runtime.backward.weight_gradients import WeightGradients
from opensmd.modelparallel.runtime.calls.changed_arguments import leave_where_changed
from opensmd.modelparallel.runtime.calls.interception import CallingThread
from opensmd.modelparallel.runtime.microbatch import Microbatch
from opensmd.modelparallel.runtime.microbatch_run import MicrobatchRun
from opensmd.modelparallel.runtime.pipeline_context import PipelineContext
from opensmd.modelparallel.runtime.placed_model import PlacedModel
from opensmd.modelparallel.runtime.results import Results
from opensmd.modelparallel.runtime.side_effects.attributes import AttributesPerMicrobatch
from opensmd.modelparallel.runtime.side_effects.per_microbatch import PerMicrobatchState
from opensmd.modelparallel.runtime.side_effects.random_numbers.torch_generators import RandomPerMicrobatch
from opensmd.modelparallel.runtime.tensors.structure import Arguments
from opensmd.modelparallel.runtime.turns.adaptive_schedule import AdaptiveSchedule
from opensmd.modelparallel.runtime.turns.record import Record
from opensmd.modelparallel.runtime.turns.threads import Threads
from opensmd.modelparallel.runtime.turns.turns import Turns

__all__ = ["StepRun"]


class StepRun:
    """Runs a step function once for each microbatch.

    Args:
        context: what the microbatches of a pipeline have in common.
        placed: the model.
        schedule: the order of this rank's work.
        function: the user's.
        calls: its arguments for each microbatch.
        detach: detach results from their graphs.
        backwards: counts the backwards.
        threads: for further microbatches.
        reducer: that of the replicas; None without them.

    Attributes:
        record: what this rank did, and when.
    """

    def __init__(
        self,
        context: PipelineContext,
        placed: PlacedModel,
        schedule: AdaptiveSchedule,
        function: Callable[..., Any],
        calls: Sequence[Arguments],
        *,
        detach: bool,
        backwards: Backwards,
        threads: Threads,
        reducer: Reducer | None,
    ) -> None:
        count = len(calls)
        self._alone = count == 1
        self._context = context
        self._placed = placed
        microbatches = _microbatches(context, calls)
        self.record = Record()
        self._weight_gradients = WeightGradients(self.record)
        self._attributes = AttributesPerMicrobatch(placed.places, context, microbatches, _name(function))
        self._state_per_microbatch = PerMicrobatchState(
            RandomPerMicrobatch(placed.generators), context.script_random, self._attributes
        )
        self._turns = Turns(
            microbatches,
            policy=schedule.policy(count, reduces=reducer is not None),
            arrivals=context.transport,
            weight_work=self._weight_gradients,
            record=self.record,
            threads=threads,
            swapped_state=self._state_per_microbatch,
            patience=schedule.patience,
        )
        backward_pass = BackwardPass(
            context,
            self._turns,
            self._weight_gradients,
            self.record,
            backwards,
            splits_from=schedule.splits_from(count),
            in_order=schedule.in_order,
            reducer=reducer,
            attributes=self._attributes,
        )
        self._results = Results(context, count, detach=detach)
        self._runs = [
            MicrobatchRun(microbatch, call, context, self._turns, backward_pass, self._results)
            for microbatch, call in zip(microbatches, _bound(function, calls), strict=True)
        ]

    @property
    def failed_at(self) -> str:
        """Say where a microbatch has failed, as a clause; empty if none has."""
        failed = self._turns.failed
        return "" if failed is None else f" in microbatch {failed.index}, after {failed.point}"

    def run(self) -> list[Any]:
        """Run all microbatches.

        Returns:
            What the function returned for each, with real tensors on every rank.
        """
        try:
            with (
                self._placed.intercepted(alone=self._alone),
                self._placed.buffers.ordered(CallingThread(), self._attributes, alone=self._alone),
            ):
                self._turns.run(self._runs)
            # Outside: results and weight gradients must not be intercepted.
            self._weight_gradients.run_all()
            return self._results.received()
        finally:
            self._context.begun += len(self._runs)
            self._weight_gradients.drop()
            self._context.escaped.forget()
            self._state_per_microbatch.end_step()
            if self._context.moved:
                leave_where_changed(self._placed.split_modules, self._context.rank)
                self._context.moved = False

    def abandon(self) -> None:
        """Release what unfinished microbatches keep, because the step has failed."""
        for run in self._runs:
            run.abandon()


def _microbatches(context: PipelineContext, calls: Sequence[Arguments]) -> list[Microbatch]:
    return [
        Microbatch(index, begun=context.begun, borrowed=context.borrowed, arguments=call)
        for index, call in enumerate(calls)
    ]


def _name(function: Callable[..., Any]) -> tuple[str, str]:
    """Return what tells step functions apart, also if a script defines them anew."""
    owner = function if hasattr(function, "__qualname__") else type(function)
    return owner.__module__, owner.__qualname__


def _bound(function: Callable[..., Any], calls: Sequence[Arguments]) -> list[Callable[[], Any]]:
    return [partial(function, *args, **kwargs) for args, kwargs in calls]
