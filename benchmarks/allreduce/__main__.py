"""``python -m benchmarks.allreduce``: start the ranks, print the tables, draw the plots."""

from __future__ import annotations

import argparse
from functools import partial

from benchmarks.harness import launch, mpi, plot
from benchmarks.harness.options import command_parser, each_mpi, rank_arguments
from benchmarks.harness.table import Ratio, print_table

SIZES = [
    4,
    64,
    1 << 10,
    4 << 10,
    16 << 10,
    64 << 10,
    256 << 10,
    1 << 20,
    4 << 20,
    16 << 20,
    64 << 20,
    256 << 20,
]


def ratios(mpi_name: str) -> list[Ratio]:
    """What the project promises to compare."""
    found: list[Ratio] = [
        Ratio("gloo / smddp", "smddp", ["gloo"]),
        Ratio("gloo / zero-copy", "smddp zero-copy", ["gloo"]),
    ]
    if mpi_name != "none":
        rivals = [f"{mpi_name} (C)", f"{mpi_name} (mpi4py)"]
        found.append(Ratio("MPI / smddp", "smddp", rivals))
        found.append(Ratio("MPI / zero-copy", "smddp zero-copy", rivals))
    floors = [
        ("floor / smddp", "smddp", "floor"),
        ("its floor / zero-copy", "smddp zero-copy", "floor zero-copy"),
    ]
    return [*found, *(Ratio(title, mine, [floor]) for title, mine, floor in floors)]


def main() -> None:
    """Measure with every MPI that is installed, with a rank a core and with more ranks than cores."""
    parser = command_parser(__doc__, seconds=2.0)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES, help="bytes, multiples of 4")
    parser.add_argument("--mpi", nargs="*", default=["MPICH", "Intel MPI"], help="none: --mpi without a name")
    parser.add_argument("--dtypes", nargs="+", default=["float32"], help="others: without MPI and the floor")
    options = parser.parse_args()
    each_mpi(options, partial(measure, options))


def measure(options: argparse.Namespace, ranks: int, chosen: mpi.Mpi | None) -> None:
    """One run of all sizes."""
    args = [*rank_arguments(options), "--sizes", *map(str, options.sizes), "--dtypes", *options.dtypes]
    results = launch.run("benchmarks.allreduce.rank", ranks=ranks, mpi=chosen, args=args)
    name = results.notes["MPI"]
    print_table(results, ratios(name))
    kind = "" if options.dtypes == ["float32"] else "dtypes-"
    stem = f"allreduce-{kind}{ranks}-{name.lower().replace(' ', '-')}"
    results.save(options.out / f"{stem}.json")
    plot.lines(results, options.out / f"{stem}.png", case=options.dtypes[0])


if __name__ == "__main__":
    main()
