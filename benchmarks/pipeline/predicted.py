"""``python -m benchmarks.pipeline.predicted``: what a step takes by the planner, beside what was measured.

The plan comes from estimates, whose seconds are no machine's in particular: what one process has taken for
the same step says how fast this machine is. Reads what ``python -m benchmarks.pipeline`` has left.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

from benchmarks.harness.results import Results
from benchmarks.harness.table import Grid
from benchmarks.pipeline.cases import CASES, OURS, SINGLE, Case
from benchmarks.pipeline.steps import build
from opensmd.modelparallel.dry_run.capture import capture
from opensmd.modelparallel.planning.partition import manual_partition, partition
from opensmd.modelparallel.planning.plan import Plan
from opensmd.modelparallel.planning.predict import StepShape, comes_back
from opensmd.modelparallel.planning.simulate import seconds_of_step

HEADINGS = (
    "case",
    "microbatches",
    "one process, ms",
    "predicted, ms",
    "measured, ms",
    "predicted / measured",
)


def plan_of(case: Case, microbatches: int) -> Plan:
    """The plan that the benchmark follows, from estimates alone."""
    model = build(case)
    inputs, targets = case.batch(1)
    trace = capture(model, lambda: case.loss(model(inputs), targets))
    if case.automatic:
        return partition(trace, 2, memory_weight=0.0, microbatches=microbatches)
    fixed = {name: int(index >= case.half) for index, (name, _) in enumerate(model.named_children())}
    step = StepShape.of(2, microbatches=microbatches)
    return manual_partition(trace, 2, fixed=fixed, default=0, step=step)


def predicted_share(case: Case, microbatches: int) -> float:
    """What a step of two stages takes of the time in which one process does the same work."""
    plan = plan_of(case, microbatches)
    step = seconds_of_step(plan.loads, microbatches, in_a_v=comes_back(plan))
    return step / (microbatches * sum(load.seconds for load in plan.loads))


def lines(results: Results) -> Iterator[tuple[str, ...]]:
    """A line for each case that was measured with both."""
    cases = {case.title: case for case in CASES.values()}
    for title, microbatches in results.cases():
        single, measured = (results.p50(title, microbatches, name) for name in (SINGLE, OURS))
        if single is None or measured is None:
            continue
        predicted = single * predicted_share(cases[title], microbatches)
        times = (f"{each / 1e3:.2f}" for each in (single, predicted, measured))
        yield (title, str(microbatches), *times, f"{predicted / measured:.2f}")


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--results", type=Path, default=Path("out/bench/pipeline-2.json"))
    results = Results.load(parser.parse_args().results)
    Grid("a step of 2 stages, predicted and measured", HEADINGS, list(lines(results))).print()


if __name__ == "__main__":
    main()
