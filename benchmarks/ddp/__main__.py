"""``python -m benchmarks.ddp``: start the ranks, print the table, draw the plot."""

from __future__ import annotations

from benchmarks.harness import launch, plot
from benchmarks.harness.options import command_parser, rank_arguments
from benchmarks.harness.table import Ratio, print_table

WIDTHS = [64, 512, 2500]
RATIOS = [
    Ratio("gloo / smddp, whole step", "smddp zero-copy", ["gloo"]),
    Ratio("gloo / smddp, above do-nothing", "smddp", ["gloo"], above="do-nothing"),
    Ratio("gloo / zero-copy, above do-nothing", "smddp zero-copy", ["gloo"], above="do-nothing"),
]


def main() -> None:
    """Measure models of 17 thousand, 1 million and 25 million parameters."""
    parser = command_parser(__doc__, seconds=10.0)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--widths", type=int, nargs="+", default=WIDTHS, help="of each of the four layers")
    options = parser.parse_args()
    args = [*rank_arguments(options), "--widths", *map(str, options.widths)]
    results = launch.run("benchmarks.ddp.rank", ranks=options.ranks, mpi=None, args=args)
    print_table(results, RATIOS)
    stem = f"ddp-{options.ranks}"
    results.save(options.out / f"{stem}.json")
    plot.bars(results, options.out / f"{stem}.png", title=f"one DDP step, {results.layout}")


if __name__ == "__main__":
    main()
