"""``python -m benchmarks.allreduce``: start the ranks, print the tables, draw the plots."""

from __future__ import annotations

import argparse
from pathlib import Path

from benchmarks.harness import launch, mpi, plot
from benchmarks.harness.table import Ratio, print_table

OUT = Path("out/bench")
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
    return [*found, Ratio("floor / smddp", "smddp", ["floor"])]


def main() -> None:
    """Measure with every MPI that is installed; more ranks than cores too, up to 16 MiB."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES, help="bytes, multiples of 4")
    parser.add_argument("--seconds", type=float, default=2.0, help="for all candidates of one size")
    parser.add_argument("--backends", nargs="+", default=["smddp", "gloo", "fake"])
    parser.add_argument("--mpi", nargs="*", default=["MPICH", "Intel MPI"], help="none: --mpi without a name")
    parser.add_argument("--out", type=Path, default=OUT, help="folder for results and plots")
    options = parser.parse_args()
    for ranks in options.ranks:
        mpis = [m for m in mpi.available(ranks=ranks, cores=launch.cores()) if m.name in options.mpi]
        for each in mpis or [None]:
            measure(ranks, each, options)


def measure(ranks: int, chosen: mpi.Mpi | None, options: argparse.Namespace) -> None:
    """One run of all sizes."""
    args = ["--sizes", *map(str, options.sizes), "--seconds", str(options.seconds)]
    args += ["--backends", *options.backends]
    results = launch.run("benchmarks.allreduce.rank", ranks=ranks, mpi=chosen, args=args)
    name = results.notes["MPI"]
    print_table(results, ratios(name))
    stem = f"allreduce-{ranks}-{name.lower().replace(' ', '-')}"
    results.save(options.out / f"{stem}.json")
    plot.lines(results, options.out / f"{stem}.png", case="all_reduce")


if __name__ == "__main__":
    main()
