"""``python -m benchmarks.partition.cuts``: the planner's cut against the best contiguous one.

Units are timed forward and backward in real steps (the median of several). The best cut is that of the same
units whose longest stage is shortest, with messages free.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.partition.models import MODELS, Subject
from benchmarks.partition.unit_times import unit_times
from opensmd.modelparallel.dry_run.capture import capture
from opensmd.modelparallel.planning.balance import Sequence1D, split_evenly
from opensmd.modelparallel.planning.partition import partition
from opensmd.modelparallel.planning.trace import ModelTrace


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


@dataclass(frozen=True)
class Cut:
    """How a model is cut: the longest stage above that of the best cut, as a share of it."""

    model: str
    units: int
    stages: int
    estimated: float
    measured: float


def cuts_of(subject: Subject, rounds: int) -> list[Cut]:
    """On 2 and 4 stages, by estimates and as if the planner had the measured times."""
    trace = capture(subject.model, subject.step)
    times = unit_times(subject.model, subject.step, len(trace.units), rounds=rounds)
    seconds = [unit.both for unit in times]
    timed = tuple(
        replace(unit, forward_seconds=each, backward_seconds=0.0)
        for unit, each in zip(trace.units, seconds, strict=True)
    )
    found = []
    for stages in (2, 4):
        best = best_longest(seconds, stages)
        plans = (trace, replace(trace, units=timed))
        estimated, measured = (longest(one, seconds, stages) / best - 1 for one in plans)
        found.append(Cut(subject.name, len(seconds), stages, estimated, measured))
    return found


def subjects(libraries: Sequence[str]) -> Iterator[tuple[str, Callable[[], Subject]]]:
    """The models here, and those of the zoo's ``libraries``, as they are asked for."""
    for make in MODELS:
        yield f"benchmark {MODELS.index(make)}", make
    if libraries:
        from tests.zoo.catalogue import names

        for library in libraries:
            for name in names(library):
                yield name, partial(_of_the_zoo, name)


def _of_the_zoo(name: str) -> Subject:
    from tests.zoo.catalogue import find
    from tests.zoo.model import ROWS, loss_of, seeded

    model = find(name)
    module = seeded(model, load=False, checkpoint=False)
    batch = model.batch(ROWS)
    return Subject(name, module, lambda: loss_of(module(**batch)), [])


def main() -> None:
    """Each model on 2 and 4 stages, as long as there is time; a file keeps what has been done."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--libraries", nargs="*", default=[], help="of tests.zoo, as far as they are installed"
    )
    parser.add_argument("--file", type=Path, help="a line of JSON for each model; models in it are left out")
    parser.add_argument("--seconds", type=float, default=math.inf, help="begin no model after this time")
    options = parser.parse_args()
    torch.set_num_threads(1)
    end = time.monotonic() + options.seconds
    lines = _lines(options.file)
    for key, make in subjects(options.libraries):
        if key in lines:
            continue
        if time.monotonic() > end:
            break
        lines[key] = _line(make, options.rounds)
        if options.file is not None:
            with options.file.open("a") as file:
                file.write(json.dumps({"key": key, **lines[key]}) + "\n")
    cuts = [Cut(**cut) for line in lines.values() for cut in line.get("cuts", ())]
    failed = [key for key, line in lines.items() if "why" in line]
    _show(cuts, failed)


def _line(make: Callable[[], Subject], rounds: int) -> dict[str, Any]:
    try:
        return {"cuts": [asdict(cut) for cut in cuts_of(make(), rounds)]}
    except Exception as error:  # a model of another library that cannot be made, or not be captured
        return {"why": f"{type(error).__name__}: {error}"[:300]}


def _lines(path: Path | None) -> dict[str, dict[str, Any]]:
    if path is None or not path.exists():
        return {}
    read = map(json.loads, path.read_text().splitlines())
    return {line.pop("key"): line for line in read}


def _show(cuts: Sequence[Cut], failed: Sequence[str]) -> None:
    console = Console(width=120)
    table = Table(title="longest stage above that of the best contiguous cut")
    for heading in ("model", "units", "stages", "planned by estimates", "planned by measured times"):
        table.add_column(heading)
    for cut in cuts:
        shares = (f"{cut.estimated:.1%}", f"{cut.measured:.1%}")
        table.add_row(cut.model, str(cut.units), str(cut.stages), *shares)
    console.print(table)
    for stages in sorted({cut.stages for cut in cuts}):
        for what in ("estimated", "measured"):
            above = sorted(getattr(cut, what) for cut in cuts if cut.stages == stages)
            within = sum(each <= 0.02 for each in above)
            console.print(
                f"{stages} stages, {what} times: {within} of {len(above)} models within 2 %, median "
                f"{statistics.median(above):.1%}, worst {above[-1]:.1%}"
            )
    if failed:
        console.print(f"{len(failed)} models could not be made or captured: {', '.join(failed[:10])} ...")


if __name__ == "__main__":
    main()
