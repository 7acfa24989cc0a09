"""``python -m benchmarks.pipeline.breakdown``: where a step of two stages spends what no bubble would not.

From half of one process's time to what a step takes, term by term, for the rank that has more to do: its
stage is no exact half; both stages at once share the machine's memory; the table has a bubble; the same order
by hand has messages, and several microbatches' activations in the caches; and what is left is the runtime's,
less what it gains by backwards in two parts.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from benchmarks.harness import launch
from benchmarks.harness.options import command_parser, rank_arguments
from benchmarks.harness.results import Results
from benchmarks.harness.table import Grid
from benchmarks.pipeline.breakdown_rank import BACKWARD, BOTH, BY_HAND, FORWARD, PARTS, SOLO, one_ahead, stage
from benchmarks.pipeline.cases import CASES, OURS, SINGLE
from opensmd.modelparallel.planning.schedules.playing import play
from opensmd.modelparallel.planning.schedules.tables import ChunkTimes

HEADINGS = (
    "case",
    "microbatches",
    "half of one process",
    "stage is no half",
    "both at once",
    "bubble",
    "messages, caches",
    "runtime",
    OURS,
    *PARTS,
)


def main() -> None:
    """Measure, print the table and leave the results."""
    parser = command_parser(__doc__, seconds=15.0)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=["gpt", "mlp"])
    parser.add_argument("--microbatches", type=int, nargs="+", default=[8, 16])
    parser.set_defaults(rounds=12)
    options = parser.parse_args()
    jobs = (
        launch.run(
            "benchmarks.pipeline.breakdown_rank",
            ranks=2,
            mpi=None,
            args=[*rank_arguments(options), "--case", case, "--microbatches", str(microbatches)],
        )
        for case in options.cases
        for microbatches in options.microbatches
    )
    merged = Results.joined(jobs, "nothing to measure: give --cases and --microbatches")
    grid(merged).print()
    merged.save(options.out / "pipeline-breakdown.json")


def lines(results: Results) -> Iterator[tuple[str, ...]]:
    """Milliseconds a step: the terms, their sum, and what the busier rank has done in it."""
    for case, microbatches in results.cases():

        def took(name: str, case: str = case, microbatches: int = microbatches) -> float:
            found = results.p50(case, microbatches, name)
            assert found is not None
            return found / 1e3

        busier = max((0, 1), key=lambda rank: took(stage(BOTH, rank)))
        both = took(stage(BOTH, busier))
        times = [ChunkTimes(took(stage(FORWARD, rank)), took(stage(BACKWARD, rank)), 0.0) for rank in (0, 1)]
        bubble = play(one_ahead(microbatches), times).seconds
        bubble -= microbatches * sum(times[busier])
        alone = took(stage(SOLO, busier))
        reached = [took(SINGLE) / 2, alone, both, both + bubble, took(BY_HAND), took(OURS)]
        terms = [reached[0], *(after - before for before, after in itertools.pairwise(reached))]
        parts = [took(stage(part, busier)) for part in PARTS]
        yield (case, str(microbatches), *(f"{each:.1f}" for each in [*terms, took(OURS), *parts]))


def grid(results: Results) -> Grid:
    """The table."""
    return Grid("a step of 2 stages, milliseconds", HEADINGS, list(lines(results)))


if __name__ == "__main__":
    main()
