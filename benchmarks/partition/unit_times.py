"""What every unit of a model takes in a real step, forward and backward.

Forward, modules tell where the run is. Backward, every node of the autograd graph belongs to the unit in
which it was made, as its sequence number tells; a node that adds up a parameter's gradient, to that of the
node before it. What passes between two nodes is the first one's.
"""

from __future__ import annotations

import bisect
import statistics
from collections import defaultdict
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from opensmd.modelparallel.dry_run.module_tree import followed
from opensmd.modelparallel.dry_run.observer import Clock

__all__ = ["UnitTimes", "unit_times"]


class UnitTimes(NamedTuple):
    """Seconds of a unit in one microbatch."""

    forward: float
    backward: float

    @property
    def both(self) -> float:
        """Of forward and backward."""
        return self.forward + self.backward


class StepClock(Clock):
    """Follows one step forward and backward."""

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))
        self.backward: dict[int, float] = defaultdict(float)
        self.calls_of: dict[int, int] = defaultdict(int)
        self._numbers = [0]  # the first sequence number from which on ...
        self._units = [-1]  # ... this unit makes the nodes

    def _tick(self) -> None:
        super()._tick()
        number = torch._C._autograd._get_sequence_nr()  # type: ignore[attr-defined]
        self._numbers.append(number)
        self._units.append(self.current)

    def enter(self, module: str) -> None:
        super().enter(module)
        self.calls_of[self.current] += 1
        self._units[-1] = self.current

    def run(self, model: nn.Module, step: Callable[[], Tensor]) -> None:
        """One step; gradients add up to those that are there."""
        with self.follow(followed(model)):
            loss = step()
            self._tick()  # what comes now is no part of the step
        handles = [
            node.register_prehook(lambda _, unit=unit: self._goes_on(unit))
            for node, unit in self._nodes(loss).items()
        ]
        self.current, self._since = -1, self.now()
        torch.autograd.backward(loss)
        self._goes_on(-1)
        for handle in handles:
            handle.remove()

    def _goes_on(self, unit: int) -> None:
        now = self.now()
        if self.current >= 0:
            self.backward[self.current] += now - self._since
        self.current, self._since = unit, now

    def _nodes(self, loss: Tensor) -> dict[torch.autograd.graph.Node, int]:
        found: dict[torch.autograd.graph.Node, int] = {}
        waiting = [(loss.grad_fn, len(self._units))]
        while waiting:
            node, before = waiting.pop()
            if node is None or node in found:
                continue
            found[node] = unit = before if _accumulates(node) else self._maker_of(node)
            waiting.extend((following, unit) for following, _ in node.next_functions)
        return found

    def _maker_of(self, node: torch.autograd.graph.Node) -> int:
        number = node._sequence_nr()  # type: ignore[attr-defined]
        return self._units[bisect.bisect_right(self._numbers, number) - 1]


def _accumulates(node: torch.autograd.graph.Node) -> bool:
    return node.name() == "torch::autograd::AccumulateGrad"


def watching_seconds() -> float:
    """What it takes to watch the call of a module: that of one that does nothing."""
    model = nn.Sequential(*[nn.Identity() for _ in range(64)])
    clocks = [Clock(torch.device("cpu")) for _ in range(9)]
    for clock in clocks:
        with clock.follow(followed(model)):
            model(torch.ones(1))
    return statistics.median(sum(clock.seconds.values()) for clock in clocks) / 65


def unit_times(model: nn.Module, step: Callable[[], Tensor], units: int, *, rounds: int) -> list[UnitTimes]:
    """The medians of ``rounds`` steps, after two that count for nothing."""
    clocks = [StepClock() for _ in range(rounds + 2)]
    for clock in clocks:
        clock.run(model, step)
    counted, watching = clocks[2:], watching_seconds()
    calls = [clocks[-1].calls_of.get(unit, 0) for unit in range(units)]
    return [
        UnitTimes(
            max(
                0.0,
                statistics.median(clock.seconds.get(unit, 0.0) for clock in counted) - watching * calls[unit],
            ),
            statistics.median(clock.backward.get(unit, 0.0) for clock in counted),
        )
        for unit in range(units)
    ]
