"""A stage that is late, in real processes: the order that the ranks take then, played in virtual time.

How long anything takes here is no matter. Gradients come to rank 0 in the order of the microbatches, so that
two ranks have a few orders to choose from, whoever is quicker, and with none of these a step takes longer
than with the fixed one, as the second test says. With one that takes backwards first it does.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import smdistributed.modelparallel.torch as smp
from opensmd.modelparallel.planning.policies.policy import Progress, Standing
from opensmd.modelparallel.planning.schedules.one_forward_one_backward import one_forward_one_backward
from opensmd.modelparallel.planning.schedules.playing import play
from opensmd.modelparallel.planning.schedules.tables import Action, Kind, Table, looped
from tests.support.partitioned import restart
from tests.support.rank_schedules import rank_schedules
from tests.support.ranks import RankPool

MICROBATCHES = 6
Order = tuple[Action, ...]
Delays = Mapping[tuple[int, Action], float]  # by rank and action

ONCE: Delays = {(0, Action("B", 0)): 6.0}
CASES: dict[str, Delays] = {
    "late once": ONCE,
    "the first stage always late": {(0, Action("F", each)): 1.0 for each in range(MICROBATCHES)},
    "the last stage always late": {(1, Action("F", each)): 1.0 for each in range(MICROBATCHES)},
}


class Stage(nn.Module):
    """Notes what it does in which order, and is late; rows of microbatch i begin with i."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.rank = rank
        self.weight = nn.Parameter(torch.ones(()))
        self.taken: list[Action] = []
        self.delays: Delays = {}

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = _Late.apply(x * self.weight, self)  # type: ignore[no-untyped-call]
        return out

    def act(self, kind: Kind, microbatch: int) -> None:
        action = Action(kind, microbatch)
        self.taken.append(action)
        time.sleep(0.03 * self.delays.get((self.rank, action), 0.0))


class _Late(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, stage: Stage) -> Tensor:
        ctx.stage, ctx.microbatch = stage, round(float(x[0, 0]))
        stage.act("F", ctx.microbatch)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        ctx.stage.act("B", ctx.microbatch)
        return gradients[0].clone(), None


def taken(cases: Mapping[str, Delays]) -> dict[str, Order]:
    """What this rank does in a step with each of the delays."""
    restart(
        partitions=2,
        microbatches=MICROBATCHES,
        pipeline="1f1b",
        auto_partition=False,
        default_partition=0,
    )
    stages = [Stage(0), Stage(1)]
    module = nn.Sequential(*stages)
    smp.set_partition(module[1], 1)
    model = smp.DistributedModel(module)
    x = torch.arange(float(MICROBATCHES)).repeat_interleave(2)[:, None].expand(-1, 3).contiguous()

    @smp.step
    def step(x: Tensor) -> None:
        model.backward(model(x).sum())

    step(x)  # in which the ranks tell each other what comes
    mine = stages[smp.pp_rank()]
    orders = {}
    for name, delays in cases.items():
        mine.taken, mine.delays = [], delays
        step(x)
        orders[name] = tuple(mine.taken)
    return orders


def seconds(rows: tuple[Order, ...], delays: Delays) -> float:
    return play(
        Table("taken", rows, looped(len(rows))), {"F": 1.0, "B": 1.0, "W": 1.0}, delays=delays
    ).seconds


def fixed_order() -> tuple[Order, ...]:
    return one_forward_one_backward(2, MICROBATCHES).rows


def test_with_a_late_stage_no_step_takes_longer_than_in_the_fixed_order(
    pool: Callable[[int], RankPool],
) -> None:
    found = pool(2).run(taken, CASES, backend="smddp")
    for name, delays in CASES.items():
        rows = tuple(orders[name] for orders in found)
        assert [sorted(row) for row in rows] == [sorted(row) for row in fixed_order()]
        assert seconds(rows, delays) <= seconds(fixed_order(), delays), (name, rows)


def reachable(done: Order, progress: tuple[Progress, ...], come: int) -> Iterator[Order]:
    """How the first of two ranks can go on; of its gradients the first ``come`` have come."""
    if all(each is Progress.DONE for each in progress):
        yield done
        return
    sent = sum(action.kind == "F" for action in done)
    policy = rank_schedules(2, "1f1b")[0].policy(MICROBATCHES, reduces=False)
    for now in range(come, sent + 1):
        choice = policy.pick(Standing(progress, [0] * MICROBATCHES, []), lambda index, now=now: index < now)
        if choice is None:
            continue
        index, new = choice.microbatch, progress[choice.microbatch] is Progress.NEW
        after = Progress.AT_BACKWARD if new else Progress.DONE
        action = Action("F" if new else "B", index)
        yield from reachable((*done, action), (*progress[:index], after, *progress[index + 1 :]), now)


@pytest.mark.parametrize("name", CASES)
def test_whatever_comes_when_two_ranks_are_as_quick_as_in_the_fixed_order(name: str) -> None:
    """The last rank has one order: each backward follows its forward."""
    delays, fixed = CASES[name], fixed_order()
    orders = set(reachable((), (Progress.NEW,) * MICROBATCHES, 0))
    assert fixed[0] in orders and len(orders) > 4
    assert max(seconds((order, fixed[1]), delays) for order in orders) <= seconds(fixed, delays)


def test_an_order_that_takes_backwards_first_is_longer_when_one_of_them_is_late() -> None:
    kinds = "FFFBBBFFFBBB"
    first = [
        Action(kind, kinds[:place].count(kind))  # type: ignore[arg-type]
        for place, kind in enumerate(kinds)
    ]
    assert seconds((tuple(first), fixed_order()[1]), ONCE) > seconds(fixed_order(), ONCE)
