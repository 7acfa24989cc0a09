"""``python -m benchmarks.small_messages``: start the ranks, print the table."""

from __future__ import annotations

from benchmarks.harness import launch
from benchmarks.harness.options import command_parser, rank_arguments
from benchmarks.harness.table import Ratio, print_table

SIZES = [4, 64, 1 << 10, 4 << 10, 16 << 10, 64 << 10, 256 << 10, 1 << 20, 4 << 20]
RATIOS = [
    Ratio("DeepSpeed / direct", "direct", ["DeepSpeed's operator"]),
    Ratio("torch.distributed / direct", "direct", ["torch.distributed"]),
]


def main() -> None:
    """Measure every size on as many ranks as asked for."""
    parser = command_parser(__doc__, seconds=1.0)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2])
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES, help="bytes, multiples of 4")
    options = parser.parse_args()
    for ranks in options.ranks:
        args = [*rank_arguments(options), "--sizes", *map(str, options.sizes)]
        results = launch.run("benchmarks.small_messages.rank", ranks=ranks, mpi=None, args=args)
        print_table(results, RATIOS)
        results.save(options.out / f"small-messages-{ranks}.json")


if __name__ == "__main__":
    main()
