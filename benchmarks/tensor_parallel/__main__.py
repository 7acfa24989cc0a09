"""``python -m benchmarks.tensor_parallel``: start the ranks, print the table, draw the plot."""

from __future__ import annotations

from benchmarks.harness.steps import measure_steps
from benchmarks.harness.table import Ratio
from benchmarks.limits import NO_COMMUNICATION

WIDTHS = [64, 256, 768]
OURS, GLOO, SMDDP = "opensmd over smddp", "DTensor over gloo", "DTensor over smddp"
RATIOS = [
    Ratio("DTensor over gloo / ours", OURS, [GLOO]),
    Ratio("at most", NO_COMMUNICATION, [GLOO]),
    Ratio("DTensor over smddp / ours", OURS, [SMDDP]),
    Ratio("beyond computing, over gloo", OURS, [GLOO], above=NO_COMMUNICATION),
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
