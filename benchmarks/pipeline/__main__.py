"""``python -m benchmarks.pipeline``: every case and number of microbatches in fresh ranks, then the table."""

from __future__ import annotations

import math
from collections.abc import Iterator

from benchmarks.harness import launch
from benchmarks.harness.options import command_parser, rank_arguments
from benchmarks.harness.results import Results
from benchmarks.harness.table import Grid
from benchmarks.pipeline.cases import ALONE, CASES, EMPTY, OURS, SINGLE, TORCH
from benchmarks.pipeline.peers import BACKENDS, PEERS


def main() -> None:
    """Measure all cases, by default on two ranks."""
    parser = command_parser(__doc__, seconds=15.0)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--microbatches", type=int, nargs="+", default=[4, 8, 16])
    parser.add_argument(
        "--peers",
        nargs="+",
        choices=[f"{peer}/{backend}" for peer in PEERS for backend in BACKENDS],
        default=["1f1b/gloo"],
        help="torch's schedules, each over a backend; ours is compared with the fastest",
    )
    parser.add_argument("--ranks", type=int, default=2, help="stages, each of which wants a core")
    parser.add_argument("--pipeline", choices=("interleaved", "v"), default="interleaved", help="ours")
    options = parser.parse_args()
    jobs = (
        launch.run(
            "benchmarks.pipeline.rank",
            ranks=options.ranks,
            mpi=None,
            args=[
                *(*rank_arguments(options), "--case", case, "--microbatches", str(microbatches)),
                *("--pipeline", options.pipeline, "--peers", *options.peers),
            ],
        )
        for case in options.cases
        for microbatches in options.microbatches
    )
    merged = Results.joined(jobs, "nothing to measure: give --cases and --microbatches")
    grid(merged).print()
    merged.save(options.out / f"pipeline-{options.ranks}.json")


HEADINGS = (
    "case",
    "microbatches",
    SINGLE,
    TORCH,
    OURS,
    ALONE,
    "share of no bubble",
    "share of ideal",
    "share of the stages' limit",
    "faster than torch",
    "runtime, µs a microbatch",
)


def lines(results: Results) -> Iterator[tuple[str, ...]]:
    """Milliseconds a step, shares of three limits, the factor against torch, and what the runtime costs.

    Without a bubble, two ranks would take half of the time of one. The ideal has 1F1B's bubble, too: a
    microbatch more than there are for each stage but the first. The stages' limit is the busiest stage as it
    is, with that bubble. What a microbatch takes above its busiest stage, forward and backward, is the
    runtime's where stages are empty; elsewhere it is the bubble's.
    """
    ranks = _ranks(results)
    for case, microbatches in results.cases():
        found = {name: results.p50(case, microbatches, name) for name in (SINGLE, TORCH, OURS, ALONE)}
        milliseconds = ("-" if item is None else f"{item / 1e3:.2f}" for item in found.values())
        single, _, mine, alone = (item or float("nan") for item in found.values())
        torchs = [name for name in results.candidates() if name.startswith("torch ")]
        rival = min((results.p50(case, microbatches, name) or math.inf for name in torchs), default=math.nan)
        bubble = (microbatches + ranks - 1) / microbatches
        shares = (single / ranks / mine, single / ranks * bubble / mine, alone * bubble / mine)
        shown = ("-" if share != share else f"{share:.1%}" for share in shares)
        runtime = f"{(mine - alone) / microbatches:.0f}" if case == EMPTY else "-"
        yield (case, str(microbatches), *milliseconds, *shown, f"{rival / mine:.2f}x", runtime)


def _ranks(results: Results) -> int:
    return int(results.layout.split()[0])


def grid(results: Results) -> Grid:
    """The table."""
    return Grid(f"pipeline of {_ranks(results)} stages, milliseconds a step", HEADINGS, list(lines(results)))


if __name__ == "__main__":
    main()
