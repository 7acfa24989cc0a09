"""What units take, by a clock: in real runs of the step, or by trials of its operations."""

from __future__ import annotations

import contextlib
import logging
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from opensmd.modelparallel.dry_run._torch_internals import has_backward_hooks
from opensmd.modelparallel.dry_run.dry import dry
from opensmd.modelparallel.dry_run.module_tree import ModuleTree
from opensmd.modelparallel.dry_run.observing.observer import Observer
from opensmd.modelparallel.dry_run.restoring import WrittenTensors
from opensmd.modelparallel.dry_run.timing.clock import UnitSeconds
from opensmd.modelparallel.dry_run.timing.step_clock import StepClock, losses_in, watching_seconds
from opensmd.modelparallel.dry_run.timing.unseen_work import outweighs
from opensmd.modelparallel.exceptions import SMPError
from opensmd.modelparallel.planning.cpu.sizes import size_of

__all__ = ["Measuring"]

logger = logging.getLogger("opensmd.modelparallel")

# Runs of a step that count, and seconds for which short steps are run again. Of forwards alone, of which none
# warms up, one more counts; and a busy kernel now and then takes a sleep for a wait, so that two are few.
FEWEST = 2
FORWARDS = 3
MOST = 8
LEAST_SECONDS = 0.2


@dataclass(frozen=True)
class Measuring:
    """Measures a step that has been seen once.

    Attributes:
        module: the model.
        call: the step.
        tree: of the model.
        names: the modules that are followed.
        observer: has seen the step.
        device: where it takes place.
    """

    module: nn.Module
    call: Callable[[], Any]
    tree: ModuleTree
    names: dict[nn.Module, str]
    observer: Observer
    device: torch.device

    def of_steps(self) -> UnitSeconds:
        """Of real runs, after one that warms up; gradients are dropped as they come.

        Two count, and of short steps more, as long as all take no longer than ``LEAST_SECONDS``. Where a
        backward would call hooks of the script, whose effects nobody could undo, none is run.
        """
        backward = not has_backward_hooks(self.module)
        clocks = self._run(FEWEST + 1, backward=backward)[1:]
        more = int(LEAST_SECONDS / max(clocks[-1].all_seconds, LEAST_SECONDS / MOST)) - FEWEST
        clocks += self._run(max(0, more), backward=backward)
        usual = _usual(clocks)
        if usual.backward is not None:
            return usual
        tried = self._trials()
        return UnitSeconds(usual.forward, None if tried is None else tried.backward)

    def if_doubtful(self) -> UnitSeconds | None:
        """Forwards in real runs where the estimate has missed work; None where not, or if they cannot be had.

        No gradients are asked for, so that nothing is kept for them: the whole model runs on this rank.
        """
        doubtful = self.observer.doubtful
        if not doubtful:
            return None
        try:
            with torch.no_grad():
                clocks = self._run(FORWARDS, backward=False)
        except Exception as error:
            # A script may need gradients, and what only estimates need must not stop it.
            logger.debug("the step could not be timed (%r); its work is estimated from shapes alone", error)
            return None
        forward = _usual(clocks).forward
        estimates = self.observer.forward_seconds
        missed = [unit for unit in doubtful if outweighs(forward.get(unit, 0.0), estimates[unit])]
        return UnitSeconds(forward, None) if missed else None

    def of_operations(self) -> UnitSeconds | None:
        """Trials of operations, where estimates are not to be trusted and nothing depends on the cut.

        With random numbers a cut decides which ones are drawn where, and what a clock says differs from run
        to run. So does it under torch's deterministic algorithms, with which nothing shall differ.
        """
        trials = self.observer.trials
        if trials.draws or torch.are_deterministic_algorithms_enabled() or not trials.are_needed:
            return None
        return self._trials()

    def _trials(self) -> UnitSeconds | None:
        """By operations; none needs more memory than parameters and one microbatch's activations."""
        if self.device.type != "cpu":
            return None
        parameters = sum(map(size_of, self.tree.parameters.values()))
        return self.observer.trials.seconds(parameters + sum(self.observer.activation_bytes.values()))

    def _run(self, rounds: int, *, backward: bool) -> list[StepClock]:
        clocks = [StepClock(self.device) for _ in range(rounds)]
        written: WrittenTensors | None = WrittenTensors(self.module, self.call)
        for clock in clocks:
            instead = clock.backward_of(self.module) if backward else None
            with (
                dry(self.module, written, instead),
                written or contextlib.nullcontext(),
                clock.follow(self.names),
            ):
                result = self._result(clock)
                clock.rest()
                losses = losses_in(result)
                if losses and not clock.went_backward:  # what its caller does in a script
                    torch.autograd.backward(losses)
            written = written if written is not None and written.found else None  # to look takes time
        return clocks

    def _result(self, clock: StepClock) -> Any:
        """What the step returns; None if it fails after a backward, as it finds no gradients here."""
        try:
            return self.call()
        except Exception as error:
            if isinstance(error, SMPError) or not clock.went_backward:
                raise
            logger.debug("a timed run ended after a backward (%r)", error)
            return None


def _usual(clocks: Sequence[StepClock]) -> UnitSeconds:
    """Of several runs, without what it took to watch them."""
    watching = watching_seconds()
    runs = [clock.taken(watching) for clock in clocks]
    forward = _medians([run.forward for run in runs])
    backwards = [run.backward for run in runs if run.backward is not None]
    if len(backwards) < len(runs):
        return UnitSeconds(forward, None)
    return UnitSeconds(forward, _medians(backwards), with_sums=True)


def _medians(runs: Sequence[Mapping[int, float]]) -> dict[int, float]:
    """By unit; of two the lesser, as what disturbs a run only makes it longer."""
    return {unit: statistics.median_low(run.get(unit, 0.0) for run in runs) for unit in runs[-1]}
