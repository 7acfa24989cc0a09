"""``python -m benchmarks.schedules``: every size and schedule in fresh ranks, then the table."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks.harness import launch
from benchmarks.harness.results import Results
from benchmarks.harness.table import Grid
from benchmarks.schedules.bounds import ALONE, BUSIEST, BY_HAND, OURS, SLEPT, bound

PEERS = ("1f1b", "izb", "zbv")
HEADINGS = (
    "stages x microbatches",
    "schedule",
    "ms a step",
    "share",
    "bound of its table",
    "of bound x layers",
    "best of torch's",
    "ratio",
    "if steps touched, ms",
)


def main() -> None:
    """Measure; torch's schedules run beside the first of ours."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sizes", nargs="+", default=["2x8", "4x16", "8x32"], help="stages x microbatches")
    parser.add_argument("--schedules", nargs="+", choices=OURS, default=["v", "interleaved", "zero_bubble"])
    parser.add_argument("--peers", nargs="*", choices=PEERS, default=list(PEERS))
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--unit", type=float, default=6e-3, help="seconds of one sleep")
    parser.add_argument("--out", type=Path, default=Path("out/bench"), help="folder for the results")
    options = parser.parse_args()
    jobs = (
        job(size, schedule, options.peers if number == 0 else [], steps=options.steps, unit=options.unit)
        for size in options.sizes
        for number, schedule in enumerate(options.schedules)
    )
    merged = Results.joined(jobs, "nothing to measure: give --sizes and --schedules")
    grid(merged).print()
    merged.save(options.out / "schedules.json")


def job(size: str, schedule: str, peers: Sequence[str], *, steps: int, unit: float) -> Results:
    """Fresh ranks that measure one schedule of ours, and those of torch beside it."""
    ranks, microbatches = size.split("x")
    args = ["--schedule", schedule, "--microbatches", microbatches, "--steps", str(steps)]
    args += ["--unit", str(unit), "--peers", *peers]
    return launch.run("benchmarks.schedules.rank", ranks=int(ranks), mpi=None, args=args)


def share(results: Results, ranks: str, microbatches: int, candidate: str) -> float:
    """Of the ideal without a bubble."""
    slept = results.p50(ranks, microbatches, candidate + SLEPT)
    taken = results.p50(ranks, microbatches, candidate)
    return float("nan") if slept is None or taken is None else slept / taken


def lines(results: Results) -> Iterator[tuple[str, ...]]:
    """One for each schedule, torch's too; the ratio is that of shares to the best of torch's."""
    for ranks, microbatches in results.cases():
        found = {
            name: share(results, ranks, microbatches, name)
            for name in results.candidates()
            if not name.endswith((SLEPT, BUSIEST)) and results.p50(ranks, microbatches, name) is not None
        }
        best = max((each for name, each in found.items() if name.startswith("torch")), default=float("nan"))
        for name, each in found.items():
            taken = results.p50(ranks, microbatches, name)
            assert taken is not None
            row = (name, f"{taken / 1e3:.0f}", f"{each:.3f}")
            limit = possible = versus = touching = ""
            if name == BY_HAND or name.startswith("opensmd"):
                most = bound(name.removeprefix("opensmd ").split()[0], int(ranks), microbatches)
                limit, possible = f"{most:.3f}", f"{each / most / found[ALONE]:.3f}"
                busiest = results.p50(ranks, microbatches, name + BUSIEST)
                touching = "" if busiest is None else f"{busiest / 1e3:.0f}"
            if name != ALONE:
                versus = f"{each / best:.2f}x"
            yield (f"{ranks} x {microbatches}", *row, limit, possible, f"{best:.3f}", versus, touching)


def grid(results: Results) -> Grid:
    """The table."""
    return Grid("schedules over sleeping stages: shares of no bubble", HEADINGS, list(lines(results)), left=2)


if __name__ == "__main__":
    main()
