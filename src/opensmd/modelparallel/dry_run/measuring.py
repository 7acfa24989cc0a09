"""Measuring the times of units: in real runs of the step, or of its operations alone."""

from __future__ import annotations

import contextlib
import logging
import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import psutil
import torch
from torch import nn

from opensmd.modelparallel.dry_run._torch_internals import has_backward_hooks
from opensmd.modelparallel.dry_run.dry import dry
from opensmd.modelparallel.dry_run.module_tree import ModuleTree
from opensmd.modelparallel.dry_run.observing.observer import Observer
from opensmd.modelparallel.dry_run.restoring import WrittenTensors
from opensmd.modelparallel.dry_run.timing.clock import Timepiece, UnitSeconds
from opensmd.modelparallel.dry_run.timing.gpu_stopwatch import GpuStopwatch
from opensmd.modelparallel.dry_run.timing.replay import Replay
from opensmd.modelparallel.dry_run.timing.step_clock import StepClock, Watching, losses_in, watching_seconds
from opensmd.modelparallel.dry_run.timing.step_record import StepRecord
from opensmd.modelparallel.dry_run.timing.stopwatch import Stopwatch
from opensmd.modelparallel.dry_run.timing.unseen_work import outweighs
from opensmd.modelparallel.exceptions import SMPError
from opensmd.modelparallel.planning.costs.cpu.sizes import size_of

__all__ = ["Measuring"]

logger = logging.getLogger("opensmd.modelparallel")

# How many runs of a step count, and for how many seconds short steps are repeated. Forwards alone have no
# warm-up, so one more counts; and a busy kernel sometimes mistakes a sleep for a wait, so two would be too
# few. Where the operations of a step of LONG seconds run again, there is none, either.
FEWEST = 2
FORWARDS = 3
MOST = 8
LEAST_SECONDS = 0.5
LONG = 0.5

# Operations return at most so many times the bytes that a step without checkpoints keeps for its backward.
RETURNED = 4
FREE = 0.5  # the most of the free memory that a replay may take


@dataclass(frozen=True)
class Measuring:
    """Measures a step that has been observed once.

    Attributes:
        module: the model.
        call: the step.
        tree: the model's tree.
        names: the watched modules.
        observer: the one that saw the step.
        device: where to measure.
    """

    module: nn.Module
    call: Callable[[], Any]
    tree: ModuleTree
    names: dict[nn.Module, str]
    observer: Observer
    device: torch.device

    def of_steps(self) -> UnitSeconds:
        """Measure real runs, after a warm-up; gradients are dropped as they arrive.

        If a backward would call the script's hooks, whose effects cannot be undone, none runs.
        """
        backward = not has_backward_hooks(self.module)
        usual = _usual(_counting(self._runs(backward=backward)), self._watching())
        if usual.backward is not None:
            return usual
        replayed = self._replayed()
        return usual if replayed is None else replayed._replace(forward=usual.forward)

    def if_doubtful(self) -> UnitSeconds | None:
        """Measure forwards in real runs if the estimate may have missed work; None if not, or if that fails.

        This runs without gradients, so that nothing is saved, because the whole model runs on this rank.
        """
        doubtful = self.observer.doubtful
        if not doubtful:
            return None
        try:
            with torch.no_grad():
                clocks = list(islice(self._runs(backward=False), FORWARDS))
        except Exception as error:
            # The script may need gradients, and a mere estimate must not stop it.
            logger.debug("the step could not be timed (%r); its work is estimated from shapes alone", error)
            return None
        forward = _usual(clocks, self._watching()).forward
        estimates = self.observer.forward_seconds
        missed = [unit for unit in doubtful if outweighs(forward.get(unit, 0.0), estimates[unit])]
        return UnitSeconds(forward, None) if missed else None

    def of_replays(self) -> UnitSeconds | None:
        """Run the operations again if that may gain something and results do not depend on the cut.

        With random numbers, the cut decides which are drawn where, and measured times differ from run to run.
        That also rules out torch's deterministic algorithms, under which nothing may differ.
        """
        record = self.observer.record
        if torch.are_deterministic_algorithms_enabled() or record.draws or not record.is_worth_timing:
            return None
        return self._replayed()

    def _replayed(self) -> UnitSeconds | None:
        """Run the operations again, as far as that is possible with the memory of a step."""
        record = self.observer.record
        if self.device.type != "cpu" or not record.is_complete or not self._has_memory_for(record):
            return None
        replay = Replay(record)
        try:
            clocks = _counting(replay.runs(), warm_up_below=LONG)
            watching = Watching(replay.call_seconds(), self._watching().node)
        except Exception as error:
            # An operation may need what is no argument of it, and a mere estimate must not stop the script.
            logger.debug("the operations could not be run again (%r); their times are estimated", error)
            return None
        usual = _usual(clocks, watching)
        if usual.backward is None:
            return usual
        return usual._replace(backward=self._completed(usual.backward))

    def _has_memory_for(self, record: StepRecord) -> bool:
        """Whether a replay, which has no checkpoints, keeps about as much as the step, and that is free."""
        parameters = sum(map(size_of, self.tree.parameters.values()))
        activations = sum(self.observer.activation_bytes.values())
        if activations > FREE * psutil.virtual_memory().available:
            return False
        return record.returned_bytes <= parameters + RETURNED * activations

    def _completed(self, backward: Mapping[int, float]) -> Mapping[int, float]:
        """Add backwards that no operation showed, such as those of autograd functions, as estimated."""
        estimates = self.observer.backward_seconds()
        estimated = sum(estimates[unit] for unit in backward)
        if not estimated:
            return estimates
        pace = sum(backward.values()) / estimated
        return {unit: pace * seconds for unit, seconds in estimates.items()} | dict(backward)

    def _watching(self) -> Watching:
        """Return the cost of watching a step, which no GPU has."""
        return Watching(0.0, 0.0) if self._on_gpu else watching_seconds()

    @property
    def _on_gpu(self) -> bool:
        return self.device.type == "cuda"

    def _runs(self, *, backward: bool) -> Iterator[StepClock[Any]]:
        """Run the step for each clock that is asked for."""
        watch: Timepiece[Any] = GpuStopwatch(self.device) if self._on_gpu else Stopwatch()
        written: WrittenTensors | None = WrittenTensors(self.module, self.call)
        while True:
            clock = StepClock(watch)
            self._run_once(clock, written, backward=backward)
            written = written if written is not None and written.found else None  # looking takes time
            yield clock

    def _run_once(self, clock: StepClock[Any], written: WrittenTensors | None, *, backward: bool) -> None:
        """Run the step; returning frees its graph, so that the next run needs no memory beside it."""
        instead = clock.backward_of(self.module) if backward else None
        with (
            dry(self.module, written, instead),
            written or contextlib.nullcontext(),
            clock.follow(self.names),
        ):
            result = self._result(clock)
            clock.rest()
            losses = losses_in(result)
            if losses and not clock.went_backward:  # as its caller would in a script
                torch.autograd.backward(losses)

    def _result(self, clock: StepClock[Any]) -> Any:
        """Return the step's result; None if it fails after a backward because it finds no gradients."""
        try:
            return self.call()
        except Exception as error:
            if isinstance(error, SMPError) or not clock.went_backward:
                raise
            logger.debug("a timed run ended after a backward (%r)", error)
            return None


def _counting(runs: Iterator[StepClock[Any]], *, warm_up_below: float = math.inf) -> list[StepClock[Any]]:
    """Return runs after a warm-up: two, or more of short steps if all together take ``LEAST_SECONDS``.

    A step of ``warm_up_below`` seconds has none: of two times the smaller counts, and the first are only
    longer.
    """
    first = next(runs)
    if first.all_seconds > warm_up_below:
        return [first, *islice(runs, FEWEST - 1)]
    clocks = list(islice(runs, FEWEST))
    more = int(LEAST_SECONDS / max(clocks[-1].all_seconds, LEAST_SECONDS / MOST)) - FEWEST
    return [*clocks, *islice(runs, max(0, more))]


def _usual(clocks: Sequence[StepClock[Any]], watching: Watching) -> UnitSeconds:
    """Return typical times of several runs, without the cost of watching."""
    runs = [clock.taken(watching) for clock in clocks]
    forward = _medians([run.forward for run in runs])
    backwards = [run.backward for run in runs if run.backward is not None]
    if len(backwards) < len(runs):
        return UnitSeconds(forward, None)
    return UnitSeconds(forward, _medians(backwards), with_sums=True)


def _medians(runs: Sequence[Mapping[int, float]]) -> dict[int, float]:
    """Return medians by unit; of two, the smaller, because disturbances only make runs longer."""
    return {unit: statistics.median_low(run.get(unit, 0.0) for run in runs) for unit in runs[-1]}
