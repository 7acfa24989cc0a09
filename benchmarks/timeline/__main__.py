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
    parser.set_defaults(rounds=200, patience=1.0)
    parser.add_argument("--steps", nargs="+", choices=STEPS, default=list(STEPS))
    parser.add_argument("--control", action="store_true", help="record in no turn: the error of measuring")
    options = parser.parse_args()
    arguments = [*rank_arguments(options), *(["--control"] if options.control else [])]
    jobs = (measure([*arguments, "--step", step]) for step in options.steps)
    merged = Results.joined(jobs, "nothing to measure: give --steps")
    grid(merged).print()
    merged.save(options.out / "timeline-2.json")


def measure(args: list[str]) -> Results:
    """One job of two ranks."""
    with tempfile.TemporaryDirectory() as folder:
        places = [launch.Place(env={VARIABLE: folder})] * 2
        return launch.run("benchmarks.timeline.rank", ranks=2, mpi=None, args=args, places=places)


def grid(results: Results) -> Grid:
    """Medians of a step's milliseconds, and the mean of the turns' ratios, with how sure it is."""
    lines = []
    for case, nbytes in results.cases():
        rows = [one for one in results.rows if (one.case, one.bytes) == (case, nbytes)]
        bare, recorded = ([one.p50 for one in rows if one.candidate == kind] for kind in (WITHOUT, WITH))
        longer, off = trimmed_mean([math.log(b / a) for a, b in zip(bare, recorded, strict=True)])
        times = (f"{statistics.median(found) / 1e3:.3f}" for found in (bare, recorded))
        low, mean, high = (f"{math.expm1(value):+.2%}" for value in (longer - off, longer, longer + off))
        lines.append([case, *times, mean, f"{low} to {high}"])
    headings = ["step", WITHOUT, WITH, "longer", "95 in 100 sure"]
    return Grid("steps without and with a timeline, milliseconds", headings, lines)


def trimmed_mean(values: Sequence[float]) -> tuple[float, float]:
    """The mean without the smallest and the largest fifth, and how far it is off at most, 95 times in 100.

    Not the median: the recorder works in one spell of some. The spells from which other programs took the
    machine are in both ends, since they are of both kinds. By Tukey and McLaughlin: the deviation is that of
    all values, with those of the ends drawn in to the last that count.
    """
    ordered = sorted(values)
    cut = len(ordered) // 5
    kept = ordered[cut : len(ordered) - cut]
    drawn_in = [min(max(value, kept[0]), kept[-1]) for value in ordered]
    share = len(kept) / len(ordered)
    return statistics.fmean(kept), 1.96 * statistics.stdev(drawn_in) / (share * math.sqrt(len(ordered)))


if __name__ == "__main__":
    main()
