"""``python -m benchmarks.partition.cuts``: the planner's cut against the best contiguous one.

Units are timed forward in real runs (the median of several), and their backward in the ratio of the
estimates. The best cut is that of the same units whose longest stage is shortest, with messages free.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from dataclasses import replace

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.partition.models import MODELS, Subject
from opensmd.modelparallel.dry_run.capture import capture
from opensmd.modelparallel.planning.balance import Sequence1D, split_evenly
from opensmd.modelparallel.planning.partition import partition
from opensmd.modelparallel.planning.trace import ModelTrace


def measured_units(subject: Subject, estimated: ModelTrace, rounds: int) -> list[float]:
    """Seconds of every unit, forward and backward."""
    runs = [capture(subject.model, subject.step, times=True).units for _ in range(rounds)]
    forwards = [
        statistics.median(run[index].forward_seconds for run in runs) for index in range(len(estimated.units))
    ]
    return [
        forward * (1 + unit.backward_seconds / unit.forward_seconds if unit.forward_seconds else 1)
        for forward, unit in zip(forwards, estimated.units, strict=True)
    ]


def best_longest(seconds: Sequence[float], stages: int) -> float:
    """The longest stage of the best contiguous cut."""
    nothing = [0.0] * len(seconds)
    items = Sequence1D(
        even=seconds,
        staged=nothing,
        weights=[1.0] * stages,
        cuts=nothing,
        fixed=[-1] * len(seconds),
        preload=[0.0] * stages,
    )
    return split_evenly(items, tolerance=0.0).worst


def longest(trace: ModelTrace, seconds: Sequence[float], stages: int) -> float:
    """The longest stage of the planner's cut."""
    plan = partition(trace, stages, memory_weight=0.0, microbatches=8)
    taken = [0.0] * stages
    for decider, unit in zip(trace.deciders, seconds, strict=True):
        taken[plan.homes[decider]] += unit
    return max(taken)


def main() -> None:
    """Each model on 2 and 4 stages: by estimates, and as if the planner had the measured times."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    torch.set_num_threads(1)
    table = Table(title="longest stage above that of the best contiguous cut")
    for heading in ("model", "stages", "planned by estimates", "planned by measured times"):
        table.add_column(heading)
    for make in MODELS:
        subject = make()
        trace = capture(subject.model, subject.step)
        seconds = measured_units(subject, trace, options.rounds)
        units = zip(trace.units, seconds, strict=True)
        timed = replace(
            trace,
            units=tuple(replace(unit, forward_seconds=each, backward_seconds=0.0) for unit, each in units),
        )
        for stages in (2, 4):
            best = best_longest(seconds, stages)
            estimated, known = (longest(one, seconds, stages) / best - 1 for one in (trace, timed))
            table.add_row(subject.name, str(stages), f"{estimated:.1%}", f"{known:.1%}")
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
