"""What every unit of a model takes in a real step, forward and backward: medians of several steps."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from opensmd.modelparallel.dry_run.module_tree import followed
from opensmd.modelparallel.dry_run.timing.step_clock import StepClock, watching_seconds

__all__ = ["UnitTimes", "unit_times"]


class UnitTimes(NamedTuple):
    """Seconds of a unit in one microbatch."""

    forward: float
    backward: float

    @property
    def both(self) -> float:
        """Of forward and backward."""
        return self.forward + self.backward


def unit_times(model: nn.Module, step: Callable[[], Tensor], units: int, *, rounds: int) -> list[UnitTimes]:
    """The medians of ``rounds`` steps, after two that count for nothing; gradients add up."""
    clocks = [StepClock(torch.device("cpu")) for _ in range(rounds + 2)]
    for clock in clocks:
        with clock.follow(followed(model)):
            loss = step()
            clock.run_backward(torch.autograd.backward, [loss], {})
        del loss  # to free its graph within the next step would count as work of the last unit
    watching = watching_seconds()
    runs = [clock.taken(watching) for clock in clocks[2:]]
    return [
        UnitTimes(
            statistics.median(run.forward.get(unit, 0.0) for run in runs),
            statistics.median((run.backward or {}).get(unit, 0.0) for run in runs),
        )
        for unit in range(units)
    ]
