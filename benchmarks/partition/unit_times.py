"""What every unit of a model takes in a real step, forward and backward: medians of several steps.

Watched steps and plain ones take turns. By how much the former are longer is what watching costs: more than
by itself, because in a step its code has left the caches.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from opensmd.modelparallel.dry_run.module_tree import followed
from opensmd.modelparallel.dry_run.timing.step_clock import StepClock, Watching
from opensmd.modelparallel.dry_run.timing.stopwatch import Stopwatch

__all__ = ["UnitTimes", "unit_times"]


class UnitTimes(NamedTuple):
    """Seconds in one microbatch, of a unit or a step."""

    forward: float
    backward: float

    @property
    def both(self) -> float:
        """Of forward and backward."""
        return self.forward + self.backward


def unit_times(model: nn.Module, step: Callable[[], Tensor], units: int, *, rounds: int) -> list[UnitTimes]:
    """The medians of ``rounds`` steps, after two that count for nothing; gradients add up."""
    clocks, plain = [], []
    for _ in range(rounds + 2):
        clocks.append(_watched(model, step))
        plain.append(_plain(step))
    clocks, plain = clocks[2:], plain[2:]
    watching = _cost_of_watching(clocks, plain)
    runs = [clock.taken(watching) for clock in clocks]
    return [
        UnitTimes(
            statistics.median(run.forward.get(unit, 0.0) for run in runs),
            statistics.median((run.backward or {}).get(unit, 0.0) for run in runs),
        )
        for unit in range(units)
    ]


def _watched(model: nn.Module, step: Callable[[], Tensor]) -> StepClock[float]:
    # Returning frees the graph. Within the next step, that would count as work of its last unit.
    clock = StepClock(Stopwatch())
    with clock.follow(followed(model)):
        loss = step()
        clock.run_backward(torch.autograd.backward, [loss], {})
    return clock


def _plain(step: Callable[[], Tensor]) -> UnitTimes:
    watch = Stopwatch()
    start = watch.now()
    loss = step()
    between = watch.now()
    torch.autograd.backward(loss)
    return UnitTimes(between - start, watch.now() - between)


def _cost_of_watching(clocks: Sequence[StepClock[float]], plain: Sequence[UnitTimes]) -> Watching:
    calls = sum(clocks[0].calls_of.values())
    nodes = sum(clocks[0].nodes_of.values())
    forward = statistics.median(
        sum(clock.seconds.values()) - alone.forward for clock, alone in zip(clocks, plain, strict=True)
    )
    backward = statistics.median(
        sum(clock.backward.values()) - alone.backward for clock, alone in zip(clocks, plain, strict=True)
    )
    return Watching(max(0.0, forward) / calls, max(0.0, backward) / nodes)
