"""``python -m benchmarks.partition``: plan by estimates, then measure every stage of the plan."""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from benchmarks.partition.models import MODELS, Subject
from opensmd.modelparallel.dry_run.capture import capture
from opensmd.modelparallel.planning.partition import manual_partition, partition
from opensmd.modelparallel.planning.plan import Plan


class StageClock:
    """Splits one forward and backward of a chain at the borders of a plan."""

    def __init__(self, model: nn.Module, plan: Plan) -> None:
        modules = dict(model.named_modules())
        self.seconds: dict[int, float] = defaultdict(float)
        self._stage = 0
        self._since = 0.0
        order = sorted(plan.atomic().items(), key=lambda item: list(modules).index(item[0]))
        self._handles = []
        for (_, before), (name, stage) in itertools.pairwise(order):
            if before != stage:
                self._handles.append(modules[name].register_forward_pre_hook(self._border(before, stage)))

    def _border(self, before: int, stage: int) -> Callable[[nn.Module, tuple[Tensor, ...]], None]:
        def hook(_: nn.Module, inputs: tuple[Tensor, ...]) -> None:
            self._tick(stage)
            inputs[0].register_hook(lambda gradient: self._tick(before))  # type: ignore[no-untyped-call]

        return hook

    def _tick(self, stage: int) -> None:
        now = time.perf_counter()
        self.seconds[self._stage] += now - self._since
        self._stage, self._since = stage, now

    def run(self, subject: Subject) -> dict[int, float]:
        """Seconds of each stage in one step."""
        self.seconds.clear()
        self._stage, self._since = 0, time.perf_counter()
        torch.autograd.backward(subject.step())
        self._tick(0)
        return dict(self.seconds)

    def close(self) -> None:
        for handle in self._handles:
            handle.remove()


def measure(subject: Subject, plan: Plan, *, rounds: int) -> list[float]:
    """Median seconds of each stage; gradients add up as over microbatches."""
    clock = StageClock(subject.model, plan)
    samples = [clock.run(subject) for _ in range(rounds + 3)][3:]
    clock.close()
    return [statistics.median(sample.get(stage, 0.0) for sample in samples) for stage in range(plan.stages)]


def equal_layers(subject: Subject, stages: int) -> Plan:
    """The same number of layers on every stage; what is before them on the first, after them on the last."""
    trace = capture(subject.model, subject.step)
    per_stage = len(subject.layers) / stages
    fixed = {name: min(stages - 1, int(i / per_stage)) for i, name in enumerate(subject.layers)}
    after = False
    for name in trace.modules:
        after = after or name == subject.layers[-1]
        if name and "." not in name and name not in fixed:
            fixed[name] = stages - 1 if after else 0
    return manual_partition(trace, stages, fixed=fixed, default=0)


def main() -> None:
    """Measure each model on 2 and 4 stages."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--out", type=Path, default=Path("out/bench"))
    options = parser.parse_args()
    torch.set_num_threads(1)
    table = Table(title="stage times, share of a step")
    for heading in ("model", "stages", "predicted", "measured", "longest / shortest - 1", "longest x stages"):
        table.add_column(heading)
    table.add_column("equal layers: longest x stages")
    found = []
    for make in MODELS:
        for stages in (2, 4):
            subject = make()
            plan = partition(capture(subject.model, subject.step), stages, memory_weight=0.0, microbatches=8)
            predicted = [load.seconds for load in plan.loads]
            times = measure(subject, plan, rounds=options.rounds)
            equal = measure(subject, equal_layers(subject, stages), rounds=options.rounds)
            row = {
                "model": subject.name,
                "stages": stages,
                "predicted": [one / sum(predicted) for one in predicted],
                "measured": [seconds / sum(times) for seconds in times],
                "spread": max(times) / min(times) - 1,
                "longest": max(times) * stages / sum(times),
                "equal_layers_longest": max(equal) * stages / sum(equal),
            }
            found.append(row)
            table.add_row(
                subject.name,
                str(stages),
                " ".join(f"{one / sum(predicted):.1%}" for one in predicted),
                " ".join(f"{seconds / sum(times):.1%}" for seconds in times),
                f"{max(times) / min(times) - 1:.1%}",
                f"{max(times) * stages / sum(times):.2f}",
                f"{max(equal) * stages / sum(equal):.2f}",
            )
    Console(width=150).print(table)
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "partition.json").write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
