"""``python -m benchmarks.tensor_parallel``: start the ranks, print the table, draw the plot."""

from __future__ import annotations

from benchmarks.harness import launch, plot
from benchmarks.harness.options import command_parser, rank_arguments
from benchmarks.harness.table import Ratio, print_table

WIDTHS = [64, 256, 768]
RATIOS = [
    Ratio("DTensor over gloo / ours", "opensmd over smddp", ["DTensor over gloo"]),
    Ratio("DTensor over smddp / ours", "opensmd over smddp", ["DTensor over smddp"]),
]


def main() -> None:
    """Measure stacks of three widths."""
    parser = command_parser(__doc__, seconds=12.0)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--widths", type=int, nargs="+", default=WIDTHS, help="of hidden states")
    options = parser.parse_args()
    args = [*rank_arguments(options), "--widths", *map(str, options.widths)]
    results = launch.run("benchmarks.tensor_parallel.rank", ranks=options.ranks, mpi=None, args=args)
    print_table(results, RATIOS)
    stem = f"tensor-parallel-{options.ranks}"
    results.save(options.out / f"{stem}.json")
    plot.bars(results, options.out / f"{stem}.png", title=f"one tensor-parallel step, {results.layout}")


if __name__ == "__main__":
    main()
