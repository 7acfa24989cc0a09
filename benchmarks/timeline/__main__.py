"""``python -m benchmarks.timeline``: the same steps without and with a timeline, in turn."""

from __future__ import annotations

import math
import statistics
import tempfile
from collections.abc import Sequence

from benchmarks.harness import launch
from benchmarks.harness.options import command_parser, rank_arguments
from benchmarks.harness.results import Results
from benchmarks.harness.table import Grid
from benchmarks.timeline.rank import STEPS, WITH, WITHOUT
from opensmd.timeline.recorder import VARIABLE


def main() -> None:
    """A job for each kind of step, which switches recording on and off."""
    parser = command_parser(__doc__, seconds=0.0)
    parser.set_defaults(rounds=50, patience=1.0)
    parser.add_argument("--steps", nargs="+", choices=STEPS, default=list(STEPS))
    options = parser.parse_args()
    jobs = (measure([*rank_arguments(options), "--step", step]) for step in options.steps)
    merged = Results.joined(jobs, "nothing to measure: give --steps")
    grid(merged).print()
    merged.save(options.out / "timeline-2.json")


def measure(args: list[str]) -> Results:
    """One job of two ranks."""
    with tempfile.TemporaryDirectory() as folder:
        places = [launch.Place(env={VARIABLE: folder})] * 2
        return launch.run("benchmarks.timeline.rank", ranks=2, mpi=None, args=args, places=places)


def grid(results: Results) -> Grid:
    """Medians of a step's milliseconds, and the median of the turns' ratios, with how sure it is."""
    lines = []
    for case, nbytes in results.cases():
        rows = [one for one in results.rows if (one.case, one.bytes) == (case, nbytes)]
        bare, recorded = ([one.p50 for one in rows if one.candidate == kind] for kind in (WITHOUT, WITH))
        longer = [b / a - 1 for a, b in zip(bare, recorded, strict=True)]
        times = (f"{statistics.median(found) / 1e3:.3f}" for found in (bare, recorded))
        low, high = surely(longer)
        lines.append([case, *times, f"{statistics.median(longer):+.1%}", f"{low:+.1%} to {high:+.1%}"])
    headings = ["step", WITHOUT, WITH, "longer", "95 in 100 sure"]
    return Grid("steps without and with a timeline, milliseconds", headings, lines)


def surely(values: Sequence[float]) -> tuple[float, float]:
    """Between what the median lies, 95 times in 100, of all turns that there could be."""
    ordered, half = sorted(values), len(values) / 2
    away = 0.98 * math.sqrt(len(values))
    return ordered[max(0, math.floor(half - away))], ordered[min(len(values), math.ceil(half + away)) - 1]


if __name__ == "__main__":
    main()
