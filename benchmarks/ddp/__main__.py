"""``python -m benchmarks.ddp``: start the ranks, print the table, draw the plot."""

from __future__ import annotations

from benchmarks.harness.steps import measure_steps
from benchmarks.harness.table import Ratio

WIDTHS = [64, 512, 2500]
RATIOS = [
    Ratio("gloo / smddp, whole step", "smddp zero-copy", ["gloo"]),
    Ratio("gloo / smddp, above do-nothing", "smddp", ["gloo"], above="do-nothing"),
    Ratio("gloo / zero-copy, above do-nothing", "smddp zero-copy", ["gloo"], above="do-nothing"),
]


def main() -> None:
    """Measure models of 17 thousand, 1 million and 25 million parameters."""
    measure_steps(
        __doc__, "ddp", RATIOS, WIDTHS, of="of each of the four layers", step="DDP step", seconds=10.0
    )


if __name__ == "__main__":
    main()
