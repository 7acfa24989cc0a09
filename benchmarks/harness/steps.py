"""The command of a benchmark that times one training step of models of several widths."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.harness import launch, plot
from benchmarks.harness.options import command_parser, rank_arguments
from benchmarks.harness.table import Ratio, print_table

__all__ = ["measure_steps"]


def measure_steps(
    doc: str | None,
    name: str,
    ratios: Sequence[Ratio],
    widths: Sequence[int],
    *,
    of: str,
    step: str,
    seconds: float,
) -> None:
    """Read the options, start the ranks of ``benchmarks.<name>``, print the table, save it and its plot.

    Args:
        doc: of the command, for its ``--help``.
        name: of the benchmark's package.
        ratios: of the table.
        widths: measured unless others are asked for.
        of: what is as wide, for the help.
        step: what is timed, for the plot's title.
        seconds: for all candidates of one width, unless others are asked for.
    """
    parser = command_parser(doc, seconds=seconds)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--widths", type=int, nargs="+", default=list(widths), help=of)
    options = parser.parse_args()
    args = [*rank_arguments(options), "--widths", *map(str, options.widths)]
    results = launch.run(f"benchmarks.{name}.rank", ranks=options.ranks, mpi=None, args=args)
    print_table(results, ratios)
    stem = f"{name.replace('_', '-')}-{options.ranks}"
    results.save(options.out / f"{stem}.json")
    plot.bars(results, options.out / f"{stem}.png", title=f"one {step}, {results.layout}")
