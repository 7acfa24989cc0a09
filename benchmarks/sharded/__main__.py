"""``python -m benchmarks.sharded``: start the ranks, print the table, draw the plot."""

from __future__ import annotations

from benchmarks.harness import launch, plot
from benchmarks.harness.options import command_parser, rank_arguments
from benchmarks.harness.table import Ratio, print_table

WIDTHS = [128, 512]
RATIOS = [
    Ratio("FSDP2 over gloo / ours", "opensmd over smddp", ["FSDP2 over gloo"]),
    Ratio("FSDP2 over smddp / ours", "opensmd over smddp", ["FSDP2 over smddp"]),
]


def main() -> None:
    """Measure stacks of blocks of several widths."""
    parser = command_parser(__doc__, seconds=12.0)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--widths", type=int, nargs="+", default=WIDTHS, help="of hidden states")
    options = parser.parse_args()
    args = [*rank_arguments(options), "--widths", *map(str, options.widths)]
    results = launch.run("benchmarks.sharded.rank", ranks=options.ranks, mpi=None, args=args)
    print_table(results, RATIOS)
    stem = f"sharded-{options.ranks}"
    results.save(options.out / f"{stem}.json")
    plot.bars(results, options.out / f"{stem}.png", title=f"one sharded step, {results.layout}")


if __name__ == "__main__":
    main()
