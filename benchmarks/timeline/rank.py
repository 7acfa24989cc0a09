"""One rank of the benchmark of the timeline: takes steps, with recording on and off in turn."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

from benchmarks.ddp.rank import training
from benchmarks.harness.meeting import Stamps
from benchmarks.harness.options import rank_parser
from benchmarks.harness.rank import Rank, join, leave
from benchmarks.harness.results import Results, row
from benchmarks.harness.sampling import Candidate, run_block, timed
from benchmarks.pipeline.cases import CASES
from benchmarks.pipeline.rank import ours, over_smddp
from opensmd.native import core
from opensmd.timeline.recorder import recorder

Step = Callable[[], object]
MICROBATCHES = 8
WARM_UP = 3  # steps
SPELL = 0.05  # seconds without a change: shorter than most of what other programs do
WITHOUT, WITH = "without", "with --timeline"


def ddp(backend: str, width: int, patience: float) -> tuple[Rank, Step]:
    """DDP, whose collectives are recorded."""
    me = join([backend], patience=patience)
    return me, training(me.groups[backend], width)[0]


def split(case: str, patience: float) -> tuple[Rank, Step]:
    """A model in two stages, whose microbatches, messages and collectives are recorded."""
    me = over_smddp(join([], patience=patience))
    return me, ours(CASES[case], MICROBATCHES)


STEPS: dict[str, Callable[[float], tuple[Rank, Step]]] = {
    "DDP, width 64": partial(ddp, "smddp", 64),
    "DDP, width 512": partial(ddp, "smddp", 512),
    "DDP over Gloo, width 64": partial(ddp, "gloo", 64),
    "split, tiny": partial(split, "tiny"),
    "split, gpt": partial(split, "gpt"),
}


def switched(step: Step, spell: Step, rank: int, name: str, *, on: bool) -> Candidate:
    """Spells with recording on, or with all of it off, after a step that finds what has just changed."""
    chosen = recorder(rank)
    assert chosen is not None
    block = timed(spell)

    def switch_and_call(stamps: Stamps) -> None:
        chosen.paused = not on
        if on:
            core.record_events(chosen.alarm)
            core.record_calls_of_torch()
        else:
            core.stop_events()
            core.leave_calls_of_torch()
        step()
        block(stamps)

    return Candidate(name, switch_and_call)


def spell_of(step: Step, me: Rank) -> tuple[Step, int]:
    """Steps that take about SPELL seconds together, and how many they are."""
    microseconds = run_block(Candidate("step", timed(step)), me.meeting, 5, WARM_UP)
    count = max(1, math.ceil(SPELL * 1e6 / sorted(microseconds)[2]))

    def steps() -> None:
        for _ in range(count):
            step()

    return steps, count


def main() -> None:
    """Take spells of steps of both kinds in turn and leave their times to rank 0."""
    parser = rank_parser()
    parser.add_argument("--step", required=True, choices=STEPS)
    parser.add_argument("--control", action="store_true")
    options = parser.parse_args()
    me, step = STEPS[options.step](options.patience)
    spell, count = spell_of(step, me)
    kinds = [
        switched(step, spell, me.rank, WITHOUT, on=False),
        switched(step, spell, me.rank, WITH, on=not options.control),
    ]
    results = Results("timeline", me.layout)
    for turn in range(options.rounds):
        for candidate in kinds[:: 1 if turn % 2 == 0 else -1]:
            me.calm.wait_for_calm()
            (microseconds,) = run_block(candidate, me.meeting, 1, 0)
            results.rows.append(row(options.step, 0, candidate.name, [microseconds / count]))
    del step, spell, kinds  # a model must not outlive its groups
    leave(me, results)


if __name__ == "__main__":
    main()
