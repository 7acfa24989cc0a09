"""``python -m benchmarks.partition.cuts``: the planner's cut against the best contiguous one.

Units are timed forward and backward in real steps (the median of several). The best cut is that of the same
units whose longest stage is shortest, with messages free, and again with what the
planner counts for them.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.partition.models import MODELS, Subject
from benchmarks.partition.unit_times import unit_times
from opensmd.launch.allocator import keeping_memory
from opensmd.modelparallel.dry_run.capture import capture
from opensmd.modelparallel.planning.balance import Sequence1D, split_evenly
from opensmd.modelparallel.planning.partition import partition
from opensmd.modelparallel.planning.trace import ModelTrace
from opensmd.modelparallel.planning.units import UnitSequence


def best_longest(seconds: Sequence[float], cuts: Sequence[float], stages: int) -> float:
    """The longest stage of the best contiguous cut; one before a unit costs both sides what ``cuts`` says."""
    items = Sequence1D(
        even=seconds,
        staged=[0.0] * len(seconds),
        weights=[1.0] * stages,
        cuts=cuts,
        fixed=[-1] * len(seconds),
        preload=[0.0] * stages,
    )
    return split_evenly(items, tolerance=0.0).worst


def longest(trace: ModelTrace, seconds: Sequence[float], cuts: Sequence[float], stages: int) -> float:
    """The longest stage of the planner's cut."""
    plan = partition(trace, stages, memory_weight=0.0, microbatches=8)
    homes = [plan.homes[decider] for decider in trace.deciders]
    taken = [0.0] * stages
    for unit, home in enumerate(homes):
        taken[home] += seconds[unit]
        if unit and home != homes[unit - 1]:
            taken[home] += cuts[unit]
            taken[homes[unit - 1]] += cuts[unit]
    return max(taken)


def message_seconds(trace: ModelTrace) -> list[float]:
    """What the planner thinks that a cut before each unit costs each of the two sides."""
    position = {unit: unit for unit in range(len(trace.units))}
    return UnitSequence(trace, position, len(position), (-1,) * len(position), {}).cut_seconds()


@dataclass(frozen=True)
class Cut:
    """How a model is cut: the longest stage above that of the best cut, as a share of it."""

    model: str
    units: int
    stages: int
    estimated: float
    measured: float
    with_messages: float


def with_seconds(trace: ModelTrace, seconds: Sequence[float]) -> ModelTrace:
    """As if the planner knew what each unit takes."""
    units = zip(trace.units, seconds, strict=True)
    timed = (replace(unit, forward_seconds=each, backward_seconds=0.0) for unit, each in units)
    return replace(trace, units=tuple(timed))


def cuts_of(name: str, trace: ModelTrace, seconds: Sequence[float]) -> list[Cut]:
    """On 2 and 4 stages: planned by estimates, by the measured times, and by them where the best cut pays
    for its messages, too."""
    timed, free = with_seconds(trace, seconds), [0.0] * len(seconds)
    messages = message_seconds(timed)
    found = []
    for stages in (2, 4):
        shares = (
            longest(plan, seconds, costs, stages) / best_longest(seconds, costs, stages) - 1
            for plan, costs in ((trace, free), (timed, free), (timed, messages))
        )
        found.append(Cut(name, len(seconds), stages, *shares))
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
    parser.add_argument("--file", type=Path, help="keeps what units took; models in it are not timed again")
    parser.add_argument("--seconds", type=float, default=math.inf, help="time no model after this time")
    options = parser.parse_args()
    _keep_memory()
    torch.set_num_threads(1)
    end = time.monotonic() + options.seconds
    known = _known(options.file)
    cuts, failed = [], []
    for key, make in subjects(options.libraries):
        if key not in known and time.monotonic() > end:
            continue
        try:
            subject = make()
            trace = capture(subject.model, subject.step)
            if key not in known:
                known[key] = _seconds(subject, trace, options.rounds)
                _keep(options.file, key, known[key])
            cuts += cuts_of(subject.name, trace, known[key])
        except Exception as error:  # a model of another library that cannot be made, or not be captured
            failed.append(f"{key}: {type(error).__name__}: {error}"[:300])
    _show(cuts, failed)


def _keep_memory() -> None:
    """Begins again with the settings of memory that smdrun gives to ranks.

    Without them, some time goes into pages that were given back to the kernel after the step before.
    """
    settings = keeping_memory(os.environ)
    if settings:
        arguments = [sys.executable, "-m", "benchmarks.partition.cuts", *sys.argv[1:]]
        os.execve(sys.executable, arguments, os.environ | settings)


def _seconds(subject: Subject, trace: ModelTrace, rounds: int) -> list[float]:
    times = unit_times(subject.model, subject.step, len(trace.units), rounds=rounds)
    return [unit.both for unit in times]


def _known(path: Path | None) -> dict[str, list[float]]:
    if path is None or not path.exists():
        return {}
    read = map(json.loads, path.read_text().splitlines())
    return {line["key"]: line["seconds"] for line in read}


def _keep(path: Path | None, key: str, seconds: Sequence[float]) -> None:
    if path is not None:
        with path.open("a") as file:
            file.write(json.dumps({"key": key, "seconds": seconds}) + "\n")


def _show(cuts: Sequence[Cut], failed: Sequence[str]) -> None:
    console = Console(width=120)
    table = Table(title="longest stage above that of the best contiguous cut")
    for heading in ("model", "units", "stages", "by estimates", "by measured times", "messages counted"):
        table.add_column(heading)
    for cut in cuts:
        shares = (f"{each:.1%}" for each in (cut.estimated, cut.measured, cut.with_messages))
        table.add_row(cut.model, str(cut.units), str(cut.stages), *shares)
    console.print(table)
    for stages in sorted({cut.stages for cut in cuts}):
        for what in ("estimated", "measured", "with_messages"):
            above = sorted(getattr(cut, what) for cut in cuts if cut.stages == stages)
            within = sum(each <= 0.02 for each in above)
            times = what.replace("_", " ")
            console.print(
                f"{stages} stages, {times}: {within} of {len(above)} models within 2 %, median "
                f"{statistics.median(above):.1%}, worst {above[-1]:.1%}"
            )
    if failed:
        console.print("could not be made or captured:", *failed, sep="\n")


if __name__ == "__main__":
    main()
