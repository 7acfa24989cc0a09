"""One rank of a benchmark that times one training step of models of several widths (see ``steps``)."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from benchmarks.harness.options import plan, rank_parser
from benchmarks.harness.rank import Rank, join, leave
from benchmarks.harness.results import Results, row
from benchmarks.harness.sampling import Candidate, sample

__all__ = ["measure_widths"]


def measure_widths(
    claim: str,
    contestants: Callable[[Rank, int], Sequence[Candidate]],
    *,
    case: Callable[[int], tuple[str, int]],
    backends: Sequence[str] | None = None,
    finish: Callable[[], None] = lambda: None,
) -> None:
    """Measure every width that was asked for and leave the results to rank 0.

    Args:
        claim: what is measured.
        contestants: of one width. Nothing holds their models when the next width comes.
        case: of a width, its name and the bytes that it stands for.
        backends: of the groups; those that were asked for by default.
        finish: what is to be ended before the groups are.
    """
    parser = rank_parser()
    parser.add_argument("--widths", type=int, nargs="+", required=True)
    options = parser.parse_args()
    me = join(backends or options.backends, patience=options.patience)
    results = Results(claim, me.layout)
    for width in options.widths:
        name, nbytes = case(width)
        found = sample(contestants(me, width), me.meeting, me.calm, plan(options))
        rows = [row(name, nbytes, key, samples) for key, samples in found.items()]
        results.rows += rows
        if me.rank == 0:
            print(f"{name}: {', '.join(f'{r.candidate} {r.p50:.5g}' for r in rows)}", flush=True)
    finish()
    leave(me, results)
