"""``python -m benchmarks.sharded``: start the ranks, print the table, draw the plot."""

from __future__ import annotations

from benchmarks.harness.steps import measure_steps
from benchmarks.harness.table import Ratio
from benchmarks.limits import NO_COMMUNICATION

WIDTHS = [128, 512]
RATIOS = [
    Ratio("at most", NO_COMMUNICATION, ["FSDP2 over gloo"]),
    Ratio("FSDP2 over gloo / ours", "opensmd over smddp", ["FSDP2 over gloo"]),
    Ratio("FSDP2 over smddp / ours", "opensmd over smddp", ["FSDP2 over smddp"]),
]


def main() -> None:
    """Measure stacks of blocks of several widths."""
    measure_steps(
        __doc__, "sharded", RATIOS, WIDTHS, of="of hidden states", step="sharded step", seconds=12.0
    )


if __name__ == "__main__":
    main()
