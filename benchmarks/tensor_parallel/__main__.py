"""``python -m benchmarks.tensor_parallel``: start the ranks, print the table, draw the plot."""

from __future__ import annotations

from benchmarks.harness.steps import measure_steps
from benchmarks.harness.table import Ratio

WIDTHS = [64, 256, 768]
RATIOS = [
    Ratio("DTensor over gloo / ours", "opensmd over smddp", ["DTensor over gloo"]),
    Ratio("DTensor over smddp / ours", "opensmd over smddp", ["DTensor over smddp"]),
]


def main() -> None:
    """Measure stacks of three widths."""
    measure_steps(
        __doc__,
        "tensor_parallel",
        RATIOS,
        WIDTHS,
        of="of hidden states",
        step="tensor-parallel step",
        seconds=12.0,
    )


if __name__ == "__main__":
    main()
