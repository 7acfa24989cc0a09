"""One rank of the breakdown: the stages alone, one by one and both at once, the order by hand, and ours."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist

import smdistributed.modelparallel.torch as smp
from benchmarks.harness.by_hand import ByHand
from benchmarks.harness.options import rank_parser
from benchmarks.harness.rank import Rank, join, leave
from benchmarks.harness.results import Results, row
from benchmarks.pipeline.cases import CASES, OURS, SINGLE, Case
from benchmarks.pipeline.rank import compare, ours, over_smddp, single
from benchmarks.pipeline.steps import LEARNING_RATE, build
from opensmd.modelparallel.planning.schedules.tables import Table
from opensmd.modelparallel.planning.schedules.zero_bubble import zero_bubble

__all__ = ["BACKWARD", "BOTH", "BY_HAND", "FORWARD", "PARTS", "SOLO", "one_ahead", "stage"]

SOLO, BOTH, BY_HAND = "one stage", "both stages", "by hand"
FORWARD, BACKWARD = "forward", "backward"  # of a microbatch, with both stages at once
PARTS = ("forwards", "backwards", "weights", "waits", "between", "outside")  # of a step of ours
_KINDS = {"forward": "forwards", "backward": "backwards", "weights": "weights", "wait": "waits"}
Microseconds = dict[str, float]


def main() -> None:
    """Measure one case with one number of microbatches and leave the results to rank 0."""
    parser = rank_parser()
    parser.add_argument("--case", required=True, choices=CASES)
    parser.add_argument("--microbatches", type=int, required=True)
    options = parser.parse_args()
    me = over_smddp(join([], patience=options.patience))
    case, microbatches = CASES[options.case], options.microbatches
    mine = Stage.of(case, microbatches, me.rank)
    step, whole = ours(case, microbatches), single(case, microbatches, me)
    hand = mine.by_hand()
    compare({SINGLE: whole, OURS: step})
    samples: dict[str, list[float]] = defaultdict(list)
    for number in range(-4, options.rounds):
        for found in (
            {SINGLE: timed(whole, me)},
            solo(mine, me),
            {stage(BOTH, me.rank): timed(mine.alone, me), **mine.times()},
            {BY_HAND: timed(hand, me)},
            {OURS: (taken := timed(step, me)), **parts(me.rank, taken)},
        ):
            for name, taken in found.items():
                samples[name] += [taken] if number >= 0 else []
    everyone: list[dict[str, list[float]]] = [{}, {}]
    dist.all_gather_object(everyone, dict(samples))
    results = Results("pipeline", me.layout)
    for name, values in {**everyone[1], **everyone[0]}.items():
        results.rows.append(row(case.title, microbatches, name, values))
    leave(me, results)


def stage(what: str, rank: int) -> str:
    """The name of what was measured on one rank."""
    return f"{what}, rank {rank}"


def one_ahead(microbatches: int) -> Table:
    """The order of "interleaved" on two ranks, with whole backwards."""
    table = zero_bubble(2, microbatches, more=1)
    rows = tuple(tuple(action for action in each if action.kind != "W") for each in table.rows)
    return Table("one forward further ahead", rows, table.stages)


def timed(step: Callable[[], object] | None, me: Rank) -> float:
    """Microseconds from the common beginning to this rank's end."""
    me.meeting.wait()
    start = time.perf_counter()
    if step is not None:
        step()
    taken = time.perf_counter() - start
    me.meeting.wait()
    return taken * 1e6


def solo(mine: Stage, me: Rank) -> Microseconds:
    """This rank's stage while the other rank does nothing, one after the other."""
    taken = [timed(mine.alone if rank == me.rank else None, me) for rank in (0, 1)]
    return {stage(SOLO, me.rank): taken[me.rank]}


def parts(rank: int, taken: float) -> Microseconds:
    """What this rank has done in our latest step, which has ``taken`` so many."""
    engine = smp.state.engine
    assert engine is not None
    found = dict.fromkeys(PARTS, 0.0)
    for each in engine.record:
        found[_KINDS[each.kind]] += (each.end_ns - each.start_ns) / 1e3
    span = (engine.record[-1].end_ns - engine.record[0].start_ns) / 1e3
    found["between"] = span - sum(found.values())
    found["outside"] = taken - span
    return {stage(name, rank): each for name, each in found.items()}


@dataclass
class Stage:
    """One of the two stages in plain PyTorch, on data that is there."""

    case: Case
    rank: int
    module: torch.nn.Sequential
    inputs: tuple[torch.Tensor, ...]
    targets: tuple[torch.Tensor, ...]
    between: torch.Tensor
    spent: tuple[float, float] = (0.0, 0.0)

    def __post_init__(self) -> None:
        self.optimizer = torch.optim.SGD(self.module.parameters(), lr=LEARNING_RATE)

    @classmethod
    def of(cls, case: Case, microbatches: int, rank: int) -> Stage:
        """That of a rank."""
        whole = build(case)
        inputs, targets = (each.chunk(microbatches) for each in case.batch(microbatches))
        first, last = whole[: case.half], whole[case.half :]
        with torch.no_grad():
            between = first(inputs[0])
        return cls(case, rank, last if rank else first, inputs, targets, between)

    def alone(self) -> None:
        """One forward and one backward after the other; leaves what they have taken."""
        forwards = backwards = 0.0
        self.optimizer.zero_grad()
        for number in range(len(self.inputs)):
            start = time.perf_counter()
            if self.rank:
                x = self.between.detach().requires_grad_()
                out, gradient = self._loss(self.module(x), number), None
            else:
                out, gradient = self.module(self.inputs[number]), self.between
            middle = time.perf_counter()
            torch.autograd.backward(out, gradient)
            forwards, backwards = forwards + middle - start, backwards + time.perf_counter() - middle
        self.optimizer.step()
        self.spent = forwards / len(self.inputs), backwards / len(self.inputs)

    def times(self) -> Microseconds:
        """Of a microbatch in the latest call of ``alone``."""
        forward, backward = self.spent
        return {stage(FORWARD, self.rank): forward * 1e6, stage(BACKWARD, self.rank): backward * 1e6}

    def by_hand(self) -> Callable[[], None]:
        """Both stages in the table's order."""
        table = one_ahead(len(self.inputs))
        run = ByHand(table, self.rank, [self.module], self.inputs, self.between, self._loss)

        def step() -> None:
            self.optimizer.zero_grad()
            run()
            self.optimizer.step()

        return step

    def _loss(self, out: torch.Tensor, microbatch: int) -> torch.Tensor:
        return self.case.loss(out, self.targets[microbatch]) / len(self.inputs)


if __name__ == "__main__":
    main()
