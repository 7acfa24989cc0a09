"""``python -m benchmarks.pipeline``: every case and number of microbatches in fresh ranks, then the table."""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.harness import launch
from benchmarks.harness.options import command_parser, rank_arguments
from benchmarks.harness.results import Results
from benchmarks.harness.table import Grid
from benchmarks.pipeline.cases import ALONE, CASES, EMPTY, OURS, SINGLE, TORCH


def main() -> None:
    """Measure all cases on two ranks."""
    parser = command_parser(__doc__, seconds=15.0)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--microbatches", type=int, nargs="+", default=[4, 8, 16])
    options = parser.parse_args()
    jobs = (
        launch.run(
            "benchmarks.pipeline.rank",
            ranks=2,
            mpi=None,
            args=[*rank_arguments(options), "--case", case, "--microbatches", str(microbatches)],
        )
        for case in options.cases
        for microbatches in options.microbatches
    )
    merged = Results.joined(jobs, "nothing to measure: give --cases and --microbatches")
    grid(merged).print()
    merged.save(options.out / "pipeline-2.json")


HEADINGS = (
    "case",
    "microbatches",
    SINGLE,
    TORCH,
    OURS,
    ALONE,
    "share of ideal",
    "share of the stages' limit",
    "faster than torch",
    "runtime, µs a microbatch",
)


def lines(results: Results) -> Iterator[tuple[str, ...]]:
    """Milliseconds a step, shares of two limits, the factor against torch, and what the runtime costs.

    The ideal halves the work of one process; the stages' limit takes the busiest stage as it is. Both add the
    bubble: one microbatch more than there are. What a microbatch takes above its busiest stage, forward and
    backward, is the runtime's where stages are empty; elsewhere it is the bubble's.
    """
    for case, microbatches in results.cases():
        found = {name: results.p50(case, microbatches, name) for name in (SINGLE, TORCH, OURS, ALONE)}
        milliseconds = ("-" if item is None else f"{item / 1e3:.2f}" for item in found.values())
        single, rival, mine, alone = (item or float("nan") for item in found.values())
        bubble = (microbatches + 1) / microbatches
        shares = (single / 2 * bubble / mine, alone * bubble / mine)
        shown = ("-" if share != share else f"{share:.1%}" for share in shares)
        runtime = f"{(mine - alone) / microbatches:.0f}" if case == EMPTY else "-"
        yield (case, str(microbatches), *milliseconds, *shown, f"{rival / mine:.2f}x", runtime)


def grid(results: Results) -> Grid:
    """The table."""
    return Grid("pipeline of 2 stages, milliseconds a step", HEADINGS, list(lines(results)))


if __name__ == "__main__":
    main()
