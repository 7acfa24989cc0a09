"""``python -m benchmarks.legacy``: start the ranks, print the table."""

from __future__ import annotations

from benchmarks.harness import launch
from benchmarks.harness.options import command_parser, rank_arguments
from benchmarks.harness.table import Ratio, print_table

SIZES = [4, 4 << 10, 1 << 20]
RATIOS = [Ratio("torch.distributed / deprecated", "deprecated", ["torch.distributed"])]


def main() -> None:
    """Measure the backend that was asked for."""
    parser = command_parser(__doc__, seconds=1.0)
    parser.set_defaults(backends=["smddp"])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES, help="bytes, multiples of 4")
    parser.add_argument("--backend", choices=["tcp", "gloo"], default="tcp", help="of the old API")
    options = parser.parse_args()
    args = [*rank_arguments(options), "--backend", options.backend, "--sizes", *map(str, options.sizes)]
    results = launch.run("benchmarks.legacy.rank", ranks=options.ranks, mpi=None, args=args)
    print_table(results, RATIOS)
    results.save(options.out / f"legacy-{options.ranks}-{options.backend}.json")


if __name__ == "__main__":
    main()
