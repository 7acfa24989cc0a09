"""``python -m benchmarks.partition.cuts``: the planner's cut against the best contiguous one.

Units are timed forward and backward in real steps (the median of several). The best cut is that of the same
units whose longest stage is shortest, with what the planner counts for messages, and again with messages
free. It is compared with cuts that are planned by estimates from shapes, by default (operations run again),
by steps that are timed in the dry run, and by the very times that judge.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.partition.kept_memory import with_kept_memory
from benchmarks.partition.models import MODELS, Subject
from benchmarks.partition.unit_times import unit_times
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
        cuts=[cuts] * (stages - 1),
        fixed=[-1] * len(seconds),
        preload=[0.0] * stages,
        alone=[True] * len(seconds),
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


# How a cut is planned.
BY_ESTIMATES, BY_DEFAULT, BY_STEPS, BY_THE_SAME = "estimates", "default", "timed steps", "the same times"
WAYS: dict[str, dict[str, bool]] = {
    BY_ESTIMATES: {},
    BY_DEFAULT: {"operations": True},
    BY_STEPS: {"times": True},
}


@dataclass(frozen=True)
class Cut:
    """How a model is cut: the longest stage above that of the best cut, as a share of it, by way of planning.

    ``free`` is the same with messages free.
    """

    model: str
    units: int
    stages: int
    above: dict[str, float]
    free: dict[str, float]


def with_seconds(trace: ModelTrace, seconds: Sequence[float]) -> ModelTrace:
    """As if the planner knew what each unit takes."""
    units = zip(trace.units, seconds, strict=True)
    timed = (replace(unit, forward_seconds=each, backward_seconds=0.0) for unit, each in units)
    return replace(trace, units=tuple(timed))


def cuts_of(name: str, traces: Mapping[str, ModelTrace], seconds: Sequence[float]) -> list[Cut]:
    """On 2 and 4 stages, planned in all ways, and judged by measured times."""
    timed = with_seconds(traces[BY_ESTIMATES], seconds)
    ways = {**traces, BY_THE_SAME: timed}
    found = []
    for stages in (2, 4):
        above, free = (
            {
                way: longest(trace, seconds, costs, stages) / best_longest(seconds, costs, stages) - 1
                for way, trace in ways.items()
            }
            for costs in (message_seconds(timed), [0.0] * len(seconds))
        )
        found.append(Cut(name, len(seconds), stages, above, free))
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
    with_kept_memory("benchmarks.partition.cuts")
    torch.set_num_threads(1)
    end = time.monotonic() + options.seconds
    known = _known(options.file)
    cuts, failed = [], []
    for key, make in subjects(options.libraries):
        if key not in known and time.monotonic() > end:
            continue
        try:
            subject = make()
            traces = {way: capture(subject.model, subject.step, **more) for way, more in WAYS.items()}
            if key not in known:
                known[key] = _seconds(subject, traces[BY_ESTIMATES], options.rounds)
                _keep(options.file, key, known[key])
            cuts += cuts_of(subject.name, traces, known[key])
        except Exception as error:  # a model of another library that cannot be made, or not be captured
            failed.append(f"{key}: {type(error).__name__}: {error}"[:300])
    _show(cuts, failed)


def _summary(above: Sequence[float]) -> str:
    within = sum(each <= 0.02 for each in above)
    return (
        f"median {statistics.median(above):.1%}, mean {statistics.fmean(above):.1%}, worst {max(above):.1%}, "
        f"{within} of {len(above)} within 2 %"
    )


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
    ways = [*WAYS, BY_THE_SAME]
    table = Table(title="longest stage above that of the best contiguous cut, messages counted")
    for heading in ("model", "units", "stages", *ways):
        table.add_column(heading)
    for cut in cuts:
        shares = (f"{cut.above[way]:.1%}" for way in ways)
        table.add_row(cut.model, str(cut.units), str(cut.stages), *shares)
    console.print(table)
    for stages in sorted({cut.stages for cut in cuts}):
        for way in ways:
            own = [cut for cut in cuts if cut.stages == stages]
            counted, free = [cut.above[way] for cut in own], [cut.free[way] for cut in own]
            console.print(
                f"{stages} stages, by {way}: {_summary(counted)}; with messages free {_summary(free)}"
            )
    if failed:
        console.print("could not be made or captured:", *failed, sep="\n")


if __name__ == "__main__":
    main()
