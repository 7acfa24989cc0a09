"""``python -m benchmarks.timeline``: the same steps in jobs without and with a timeline, in turn."""

from __future__ import annotations

import statistics
import tempfile
from dataclasses import replace

from benchmarks.harness import launch
from benchmarks.harness.options import command_parser, rank_arguments
from benchmarks.harness.results import Results
from benchmarks.harness.table import Grid
from benchmarks.timeline.rank import STEPS
from opensmd.timeline.recorder import VARIABLE

WITHOUT, WITH = "without", "with --timeline"


def main() -> None:
    """Recording is decided when a job starts, so jobs of both kinds take turns."""
    parser = command_parser(__doc__, seconds=2.0)
    parser.add_argument("--steps", nargs="+", choices=STEPS, default=list(STEPS))
    parser.add_argument("--turns", type=int, default=5, help="jobs of each kind, for each step")
    options = parser.parse_args()
    jobs = (
        measure([*rank_arguments(options), "--step", step], kind)
        for step in options.steps
        for turn in range(options.turns)
        # whoever comes second in one turn comes first in the next
        for kind in ((WITHOUT, WITH) if turn % 2 == 0 else (WITH, WITHOUT))
    )
    merged = Results.joined(jobs, "nothing to measure: give --steps, and --turns of at least 1")
    grid(merged).print()
    merged.save(options.out / "timeline-2.json")


def measure(args: list[str], kind: str) -> Results:
    """One job of two ranks."""
    with tempfile.TemporaryDirectory() as folder:
        place = launch.Place(env={VARIABLE: folder if kind == WITH else ""})
        results = launch.run("benchmarks.timeline.rank", ranks=2, mpi=None, args=args, places=[place] * 2)
    results.rows = [replace(one, candidate=kind) for one in results.rows]
    return results


def grid(results: Results) -> Grid:
    """Medians of the jobs' medians, in milliseconds, and the median and range of the turns' ratios."""
    lines = []
    for case, nbytes in results.cases():
        rows = [one for one in results.rows if (one.case, one.bytes) == (case, nbytes)]
        bare, recorded = ([one.p50 for one in rows if one.candidate == kind] for kind in (WITHOUT, WITH))
        ratios = [b / a for a, b in zip(bare, recorded, strict=True)]
        times = (f"{statistics.median(found) / 1e3:.3f}" for found in (bare, recorded))
        spread = f"{min(ratios) - 1:+.1%} to {max(ratios) - 1:+.1%}"
        lines.append([case, *times, f"{statistics.median(ratios) - 1:+.1%}", spread])
    headings = ["step", WITHOUT, WITH, "longer", "in single turns"]
    return Grid("steps without and with a timeline, milliseconds", headings, lines)


if __name__ == "__main__":
    main()
