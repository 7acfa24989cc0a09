"""One rank of the benchmark of the timeline: takes steps, with or without being recorded."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from benchmarks.ddp.rank import training
from benchmarks.harness.options import plan, rank_parser
from benchmarks.harness.rank import Rank, join, leave
from benchmarks.harness.results import Results, row
from benchmarks.harness.sampling import Candidate, sample, timed
from benchmarks.pipeline.cases import CASES
from benchmarks.pipeline.rank import ours, over_smddp

Step = Callable[[], object]
MICROBATCHES = 8
WARM_UP = 3  # steps


def ddp(width: int, patience: float) -> tuple[Rank, Step]:
    """DDP over smddp, whose collectives are recorded."""
    me = join(["smddp"], patience=patience)
    return me, training(me.groups["smddp"], width)[0]


def split(case: str, patience: float) -> tuple[Rank, Step]:
    """A model in two stages, whose microbatches, messages and collectives are recorded."""
    me = over_smddp(join([], patience=patience))
    return me, ours(CASES[case], MICROBATCHES)


STEPS: dict[str, Callable[[float], tuple[Rank, Step]]] = {
    "DDP, width 64": partial(ddp, 64),
    "DDP, width 512": partial(ddp, 512),
    "split, tiny": partial(split, "tiny"),
    "split, gpt": partial(split, "gpt"),
}


def main() -> None:
    """Measure one step and leave its times to rank 0."""
    parser = rank_parser()
    parser.add_argument("--step", required=True, choices=STEPS)
    options = parser.parse_args()
    me, step = STEPS[options.step](options.patience)
    for _ in range(WARM_UP):
        step()
    found = sample([Candidate("step", timed(step))], me.meeting, me.calm, plan(options))
    results = Results("timeline", me.layout)
    results.rows = [row(options.step, 0, name, samples) for name, samples in found.items()]
    del step  # a model must not outlive its groups
    leave(me, results)


if __name__ == "__main__":
    main()
