"""``python -m benchmarks.collectives``: start the ranks, print the tables, draw the plots."""

from __future__ import annotations

import argparse
from functools import partial

from benchmarks.collectives.operations import OPERATIONS
from benchmarks.harness import launch, mpi, plot
from benchmarks.harness.options import command_parser, each_mpi, rank_arguments
from benchmarks.harness.table import Ratio, print_table

SIZES = [4 << 10, 1 << 20, 64 << 20]


def ratios(mpi_name: str) -> list[Ratio]:
    """What the project promises to compare."""
    rivals = [f"{mpi_name} (C)", f"{mpi_name} (mpi4py)"]
    against_mpi: list[Ratio] = [] if mpi_name == "none" else [Ratio("MPI / smddp", "smddp", rivals)]
    floor = Ratio("floor / smddp", "smddp", ["floor"])
    return [Ratio("gloo / smddp", "smddp", ["gloo"]), *against_mpi, floor]


def main() -> None:
    """Measure with every MPI that is installed."""
    parser = command_parser(__doc__, seconds=2.0)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2])
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES, help="bytes, multiples of 4 x ranks")
    parser.add_argument("--operations", nargs="+", default=[operation.name for operation in OPERATIONS])
    parser.add_argument("--mpi", nargs="*", default=["MPICH", "Intel MPI"], help="none: --mpi without a name")
    options = parser.parse_args()
    each_mpi(options, partial(measure, options))


def measure(options: argparse.Namespace, ranks: int, chosen: mpi.Mpi | None) -> None:
    """One run of all operations."""
    args = [
        *rank_arguments(options),
        "--sizes",
        *map(str, options.sizes),
        "--operations",
        *options.operations,
    ]
    results = launch.run("benchmarks.collectives.rank", ranks=ranks, mpi=chosen, args=args)
    name = results.notes["MPI"]
    print_table(results, ratios(name))
    stem = f"collectives-{ranks}-{name.lower().replace(' ', '-')}"
    results.save(options.out / f"{stem}.json")
    title = f"{results.layout}, with {name}"
    plot.bars(results, options.out / f"{stem}.png", title=title, leave_out=["do-nothing"])


if __name__ == "__main__":
    main()
