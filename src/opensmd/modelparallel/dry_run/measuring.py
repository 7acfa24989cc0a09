"""What units take, by a clock: in real runs of the step, or by trials of its operations."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from opensmd.modelparallel.dry_run._torch_internals import has_backward_hooks
from opensmd.modelparallel.dry_run.dry import dry
from opensmd.modelparallel.dry_run.module_tree import ModuleTree, size_of
from opensmd.modelparallel.dry_run.observer import Observer
from opensmd.modelparallel.dry_run.restoring import WrittenParameters
from opensmd.modelparallel.dry_run.timing.clock import UnitSeconds
from opensmd.modelparallel.dry_run.timing.step_clock import StepClock, losses_in, watching_seconds
from opensmd.modelparallel.dry_run.timing.unseen_work import outweighs

__all__ = ["Measuring"]

logger = logging.getLogger("opensmd.modelparallel")


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
        """The quicker of two real runs, after one that warms up; gradients are dropped as they come.

        Where a backward would call hooks of the script, whose effects nobody could undo, none is run.
        """
        clocks = [StepClock(self.device) for _ in range(3)]
        self._run(clocks, backward=not has_backward_hooks(self.module))
        quickest = _quickest(clocks[1:])
        if quickest.backward is not None:
            return quickest
        tried = self._trials()
        return UnitSeconds(quickest.forward, None if tried is None else tried.backward)

    def if_doubtful(self) -> UnitSeconds | None:
        """Forwards in real runs where the estimate has missed work; None where not, or if they cannot be had.

        No gradients are asked for, so that nothing is kept for them: the whole model runs on this rank.
        """
        doubtful = self.observer.doubtful
        if not doubtful:
            return None
        clocks = [StepClock(self.device) for _ in range(2)]
        try:
            with torch.no_grad():
                self._run(clocks, backward=False)
        except Exception as error:
            # A script may need gradients, and what only estimates need must not stop it.
            logger.debug("the step could not be timed (%r); its work is estimated from shapes alone", error)
            return None
        forward = _quickest(clocks).forward
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

    def _run(self, clocks: Sequence[StepClock], *, backward: bool) -> None:
        written: WrittenParameters | None = WrittenParameters(self.module)
        for clock in clocks:
            instead = clock.backward_of(self.module) if backward else None
            with (
                dry(self.module, written, instead),
                written or contextlib.nullcontext(),
                clock.follow(self.names),
            ):
                result = self.call()
                clock.rest()
                losses = losses_in(result)
                if losses and not clock.went_backward:  # what its caller does in a script
                    torch.autograd.backward(losses)
            written = written if written is not None and written.found else None  # to look takes time


def _quickest(clocks: Sequence[StepClock]) -> UnitSeconds:
    """Of several runs, without what it took to watch them."""
    watching = watching_seconds()
    runs = [clock.taken(watching) for clock in clocks]
    backwards = [run.backward for run in runs if run.backward is not None]
    return UnitSeconds(
        _least([run.forward for run in runs]), _least(backwards) if len(backwards) == len(runs) else None
    )


def _least(runs: Sequence[Mapping[int, float]]) -> dict[int, float]:
    return {unit: min(run.get(unit, 0.0) for run in runs) for unit in runs[-1]}
