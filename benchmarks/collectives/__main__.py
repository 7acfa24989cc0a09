"""``python -m benchmarks.collectives``: start the ranks, print the tables, draw the plots."""

from __future__ import annotations

import argparse
from pathlib import Path

from benchmarks.collectives.operations import OPERATIONS
from benchmarks.harness import launch, mpi, plot
from benchmarks.harness.table import Ratio, print_table

OUT = Path("out/bench")
SIZES = [4 << 10, 1 << 20, 64 << 20]


def ratios(mpi_name: str) -> list[Ratio]:
    """What the project promises to compare."""
    rivals = [f"{mpi_name} (C)", f"{mpi_name} (mpi4py)"]
    against_mpi: list[Ratio] = [] if mpi_name == "none" else [Ratio("MPI / smddp", "smddp", rivals)]
    return [Ratio("gloo / smddp", "smddp", ["gloo"]), *against_mpi]


def main() -> None:
    """Measure with every MPI that is installed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2])
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES, help="bytes, multiples of 4 x ranks")
    parser.add_argument("--operations", nargs="+", default=[each.name for each in OPERATIONS])
    parser.add_argument("--seconds", type=float, default=2.0, help="for all candidates of one case")
    parser.add_argument("--backends", nargs="+", default=["smddp", "gloo", "fake"])
    parser.add_argument("--mpi", nargs="*", default=["MPICH", "Intel MPI"], help="none: --mpi without a name")
    parser.add_argument("--out", type=Path, default=OUT, help="folder for results and plots")
    options = parser.parse_args()
    for ranks in options.ranks:
        mpis = [m for m in mpi.available(ranks=ranks, cores=launch.cores()) if m.name in options.mpi]
        for each in mpis or [None]:
            measure(ranks, each, options)


def measure(ranks: int, chosen: mpi.Mpi | None, options: argparse.Namespace) -> None:
    """One run of all operations."""
    args = ["--sizes", *map(str, options.sizes), "--seconds", str(options.seconds)]
    args += ["--operations", *options.operations, "--backends", *options.backends]
    results = launch.run("benchmarks.collectives.rank", ranks=ranks, mpi=chosen, args=args)
    name = results.notes["MPI"]
    print_table(results, ratios(name))
    stem = f"collectives-{ranks}-{name.lower().replace(' ', '-')}"
    results.save(options.out / f"{stem}.json")
    plot.bars(
        results, options.out / f"{stem}.png", title=f"{results.layout}, {name}", leave_out=["do-nothing"]
    )


if __name__ == "__main__":
    main()
