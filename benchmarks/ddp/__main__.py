"""``python -m benchmarks.ddp``: start the ranks, print the table, draw the plot."""

from __future__ import annotations

import argparse
from pathlib import Path

from benchmarks.harness import launch, plot
from benchmarks.harness.table import Ratio, print_table

OUT = Path("out/bench")
WIDTHS = [64, 512, 2500]
RATIOS = [
    Ratio("gloo / smddp, whole step", "smddp zero-copy", ["gloo"]),
    Ratio("gloo / smddp, above do-nothing", "smddp", ["gloo"], above="do-nothing"),
    Ratio("gloo / zero-copy, above do-nothing", "smddp zero-copy", ["gloo"], above="do-nothing"),
]


def main() -> None:
    """Measure models of 17 thousand, 1 million and 25 million parameters."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--widths", type=int, nargs="+", default=WIDTHS, help="of each of the four layers")
    parser.add_argument("--seconds", type=float, default=10.0, help="for all candidates of one model")
    parser.add_argument("--backends", nargs="+", default=["smddp", "gloo", "fake"])
    parser.add_argument("--out", type=Path, default=OUT, help="folder for results and plots")
    options = parser.parse_args()
    args = ["--widths", *map(str, options.widths), "--seconds", str(options.seconds)]
    args += ["--backends", *options.backends]
    results = launch.run("benchmarks.ddp.rank", ranks=options.ranks, mpi=None, args=args)
    print_table(results, RATIOS)
    results.save(options.out / f"ddp-{options.ranks}.json")
    plot.bars(results, options.out / f"ddp-{options.ranks}.png", title=f"one DDP step, {results.layout}")


if __name__ == "__main__":
    main()
