"""Who runs when: whole pipelines in one process and in virtual time, compared with printed tables."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from torch.distributed import DistBackendError

from opensmd.modelparallel.exceptions import SMPError
from opensmd.modelparallel.planning.plan import StageLoad
from opensmd.modelparallel.planning.policies.fixed_order import FixedOrder
from opensmd.modelparallel.planning.policies.limits import in_flight
from opensmd.modelparallel.planning.policies.table_order import TableOrder
from opensmd.modelparallel.planning.schedules.fill_drain import fill_drain
from opensmd.modelparallel.planning.schedules.one_forward_one_backward import one_forward_one_backward
from opensmd.modelparallel.planning.simulate import parts_of_step
from opensmd.modelparallel.runtime.turns.turns import StepAborted
from tests.support.rank_schedules import rank_schedules, route
from tests.support.virtual_pipeline import Pass, Played, Rank, Stage, draw, play, table


def chain(
    count: int, microbatches: int, pipeline: str = "interleaved", *, splits: bool = False, **settings: Any
) -> list[Stage]:
    """Stages as the engine would make them, by default with backwards that nothing of can wait."""
    return [
        Stage(
            schedule.policy(microbatches, reduces=False),
            route(count, pipeline),
            splits_from=microbatches - schedule.most_split(microbatches) if splits else None,
        )
        for schedule in rank_schedules(count, pipeline, **settings)
    ]


def loop(microbatches: int, *, window: int, last_goes_last: bool = False) -> TableOrder:
    """The policy of ranks that microbatches pass in any order."""
    row = one_forward_one_backward(1, microbatches).rows[0]
    return TableOrder(row, most_active=math.inf, window=window, last_goes_last=last_goes_last)


def show(ranks: Sequence[Rank]) -> str:
    assert [rank.error for rank in ranks] == [None] * len(ranks)
    return table(ranks)


def picture(text: str) -> str:
    return textwrap.dedent(text).strip()


INTERLEAVED = {
    2: """
        rank 0   F0 F1 F2 .  B0 B0 F3 B1 B1 .  B2 B2 .  B3 B3
        rank 1   .  F0 B0 B0 F1 B1 B1 F2 B2 B2 F3 B3 B3
        """,
    3: """
        rank 0   F0 F1 F2 F3 .  .  .  B0 B0 .  B1 B1 .  B2 B2 .  B3 B3
        rank 1   .  F0 F1 F2 .  B0 B0 F3 B1 B1 .  B2 B2 .  B3 B3
        rank 2   .  .  F0 B0 B0 F1 B1 B1 F2 B2 B2 F3 B3 B3
        """,
    4: """
        rank 0   F0 F1 F2 F3 .  .  .  .  .  .  B0 B0 .  B1 B1 .  B2 B2 .  B3 B3
        rank 1   .  F0 F1 F2 F3 .  .  .  B0 B0 .  B1 B1 .  B2 B2 .  B3 B3
        rank 2   .  .  F0 F1 F2 .  B0 B0 F3 B1 B1 .  B2 B2 .  B3 B3
        rank 3   .  .  .  F0 B0 B0 F1 B1 B1 F2 B2 B2 F3 B3 B3
        """,
}
SIMPLE = {
    2: """
        rank 0   F0 F1 F2 F3 .  .  .  B0 B0 B1 B1 B2 B2 B3 B3
        rank 1   .  F0 F1 F2 F3 B0 B0 B1 B1 B2 B2 B3 B3
        """,
    3: """
        rank 0   F0 F1 F2 F3 .  .  .  .  .  .  B0 B0 B1 B1 B2 B2 B3 B3
        rank 1   .  F0 F1 F2 F3 .  .  .  B0 B0 B1 B1 B2 B2 B3 B3
        rank 2   .  .  F0 F1 F2 F3 B0 B0 B1 B1 B2 B2 B3 B3
        """,
    4: """
        rank 0   F0 F1 F2 F3 .  .  .  .  .  .  .  .  .  B0 B0 B1 B1 B2 B2 B3 B3
        rank 1   .  F0 F1 F2 F3 .  .  .  .  .  .  B0 B0 B1 B1 B2 B2 B3 B3
        rank 2   .  .  F0 F1 F2 F3 .  .  .  B0 B0 B1 B1 B2 B2 B3 B3
        rank 3   .  .  .  F0 F1 F2 F3 B0 B0 B1 B1 B2 B2 B3 B3
        """,
}


@pytest.mark.parametrize("count", INTERLEAVED)
def test_backwards_go_first_in_an_interleaved_chain(count: int) -> None:
    ranks = play(chain(count, 4), 4)
    assert show(ranks) == picture(INTERLEAVED[count])
    assert {len(ranks[0].threads), len(ranks[-1].threads)} == {1}  # they never wait in mid-course


@pytest.mark.parametrize("count", SIMPLE)
def test_all_forwards_go_first_in_a_simple_chain(count: int) -> None:
    assert show(play(chain(count, 4, "simple"), 4)) == picture(SIMPLE[count])


def test_one_active_microbatch_goes_through_the_chain_alone() -> None:
    assert show(play(chain(2, 3, active_microbatches=1), 3)) == picture(
        """
        rank 0   F0 .  .  .  B0 B0 F1 .  .  .  B1 B1 F2 .  .  .  B2 B2
        rank 1   .  F0 B0 B0 .  .  .  F1 B1 B1 .  .  .  F2 B2 B2
        """
    )


def test_a_fixed_order_waits_in_place_on_every_rank() -> None:
    stages = [Stage(FixedOrder(3, 4), range(3), defers=False) for _ in range(3)]
    assert show(play(stages, 4)) == picture(
        """
        rank 0   F0 F1 F2 .  .  .  .  .  .  B0 B0 F3 .  .  .  .  .  .  B1 B1 B2 B2 B3 B3
        rank 1   .  F0 F1 F2 .  .  .  B0 B0 .  .  .  F3 .  .  .  B1 B1 B2 B2 B3 B3
        rank 2   .  .  F0 F1 F2 B0 B0 .  .  .  .  .  .  F3 B1 B1 B2 B2 B3 B3
        """
    )


def test_stages_that_a_microbatch_passes_twice_let_others_go_on_in_between() -> None:
    stages = [Stage(loop(4, window=2), [0, 1, 0, 1]) for _ in range(2)]
    assert show(play(stages, 4)) == picture(
        """
        rank 0   F0 F1 F0 F1 .  .  B0 B0 .  B1 B1 B0 B0 B1 B1 F2 F3 F2 F3 .  .  B2 B2 .  B3 B3 B2 B2 B3 B3
        rank 1   .  F0 F1 F0 B0 B0 F1 B1 B1 B0 B0 B1 B1 .  .  .  F2 F3 F2 B2 B2 F3 B3 B3 B2 B2 B3 B3
        """
    )


WITH_WEIGHTS = {
    ("interleaved", 2, 6): """
        rank 0   F0 F1 F2 .  B0 B0 F3 B1 B1 F4 B2 B2 F5 B3 B3 B4 B4 B5 B5
        rank 1   .  F0 B0 B0 F1 B1 B1 F2 B2 B2 F3 B3 B3 F4 B4 F5 B5 W4 W5
        """,
    ("interleaved", 3, 6): """
        rank 0   F0 F1 F2 F3 F4 B0 B0 F5 B1 B1 B2 B2 B3 B3 B4 B4 B5 B5
        rank 1   .  F0 F1 F2 B0 F3 B1 F4 B2 W0 F5 B3 W1 B4 W2 B5 W3 W4 W5
        rank 2   .  .  F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 W0 F5 B5 W1 W2 W3 W4 W5
        """,
    ("zero_bubble", 3, 6): """
        rank 0   F0 F1 F2 F3 F4 B0 B0 F5 B1 B1 B2 B2 B3 B3 B4 B4 B5 B5
        rank 1   .  F0 F1 F2 B0 F3 B1 F4 B2 W0 F5 B3 W1 B4 W2 B5 W3 W4 W5
        rank 2   .  .  F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 W0 F5 B5 W1 W2 W3 W4 W5
        """,
    ("simple", 3, 6): """
        rank 0   F0 F1 F2 F3 F4 F5 .  .  .  .  .  .  B0 B0 B1 B1 B2 B2 B3 B3 B4 B4 B5 B5
        rank 1   .  F0 F1 F2 F3 F4 F5 .  .  .  B0 B0 B1 B1 B2 B2 B3 B3 B4 B5 W4 W5
        rank 2   .  .  F0 F1 F2 F3 F4 F5 B0 B0 B1 B1 B2 B2 B3 B4 B5 W3 W4 W5
        """,
    ("v", 2, 4): """
        rank 0   F0 F1 F2 F0 B0 W0 F1 B1 W1 F3 B0 W0 F2 B2 W2 B1 W1 F3 B3 W3 B2 W2 .  B3 W3
        rank 1   .  F0 F0 F1 F1 B0 B0 W0 W0 F2 F2 B1 B1 W1 W1 F3 F3 B2 B2 W2 W2 B3 B3 W3 W3
        """,
}


@pytest.mark.parametrize(("pipeline", "count", "microbatches"), WITH_WEIGHTS)
def test_weight_gradients_fill_the_time_in_which_a_rank_would_wait(
    pipeline: str, count: int, microbatches: int
) -> None:
    found = show(play(chain(count, microbatches, pipeline, splits=True), microbatches))
    assert found == picture(WITH_WEIGHTS[pipeline, count, microbatches])


@pytest.mark.parametrize("microbatches", [3, 8])
@pytest.mark.parametrize("count", [2, 3, 4])
def test_the_plan_foresees_what_the_turns_do(count: int, microbatches: int) -> None:
    """Also with weight gradients that fill in, of which nobody knows beforehand where."""
    stages = chain(count, microbatches, splits=True)
    held = in_flight(partitions=count, microbatches=microbatches, active_microbatches=count + 2, chain=True)
    loads = [
        StageLoad(
            forward_seconds=1,
            backward_seconds=2,
            in_flight=held[index],
            late=min(2 if count == 2 else count + 2, microbatches) if index else 0,
            late_seconds=1,
        )
        for index in range(count)
    ]
    foreseen: list[list[Played]] = [[] for _ in loads]
    for part in parts_of_step(loads, microbatches):
        foreseen[part.stage].append(Played(part.kind, part.microbatch, int(part.start), int(part.end)))
    assert draw(foreseen) == show(play(stages, microbatches))


def test_a_forward_that_is_late_holds_up_only_what_needs_it() -> None:
    first, second = chain(2, 6)
    assert show(play([replace(first, delays={1: 4}), second], 6)) == picture(
        """
        rank 0   F0 F1 F1 F1 F1 F1 F2 B0 B0 F3 B1 B1 F4 B2 B2 F5 B3 B3 B4 B4 .  B5 B5
        rank 1   .  F0 B0 B0 .  .  F1 B1 B1 F2 B2 B2 F3 B3 B3 F4 B4 B4 F5 B5 B5
        """
    )


def gradients_in_reverse(patience: int, *sent: tuple[int, int], lost: Exception | None = None) -> list[Rank]:
    """Rank 0 sends gradients of microbatches after some ticks each; the row of rank 1 is F0 F1 B0 B1."""

    def function(run: Pass) -> None:
        if run.rank.rank == 1:
            run.rank.work("F", run.index, 1)
            run.rank.turns.before_backward(run.microbatch, [(0, run.index)])
            run.rank.work("B", run.index, 1)
        elif run.index == 0:
            for microbatch, ticks in sent:
                run.rank.work("F", 0, ticks)
                run.rank.send(1, microbatch)

    row = fill_drain(1, 2).rows[0]
    policy = TableOrder(row, most_active=math.inf, early=False, weights_last=False)
    waiting = Stage(policy, range(2), patience=patience, lost=lost)
    return play([Stage(loop(2, window=2), range(2)), waiting], 2, function)


@pytest.mark.parametrize(
    ("patience", "late", "expected"),
    [
        (0, 1, "F0 F1 .  .  B1 B0"),
        (1, 1, "F0 F1 .  .  .  B0 B1"),
        (1, 3, "F0 F1 .  .  .  B1 .  B0"),
    ],
)
def test_what_is_next_in_the_table_is_waited_for_a_little(patience: int, late: int, expected: str) -> None:
    assert show(gradients_in_reverse(patience, (1, 4), (0, late))).splitlines()[1] == f"rank 1   {expected}"


def test_a_rank_that_is_lost_during_a_short_wait_is_reported() -> None:
    lost = DistBackendError("rank 0 has died")
    error = gradients_in_reverse(1, (1, 1), (0, 9), lost=lost)[1].error
    assert isinstance(error, SMPError)
    assert "microbatch 0 waits before backward" in str(error)


@pytest.mark.parametrize("patience", [1, 2, 5])
@pytest.mark.parametrize(("pipeline", "count"), [("v", 3), ("v", 4), ("interleaved", 4)])
def test_patience_never_stops_a_step(pipeline: str, count: int, patience: int) -> None:
    """Also where what is waited for needs what the rank does not do meanwhile."""
    stages = [
        replace(stage, patience=patience, delays={(3 * place) % 7: 4, (5 * place) % 7: 2})
        for place, stage in enumerate(chain(count, 7, pipeline, splits=True))
    ]
    assert [rank.error for rank in play(stages, 7)] == [None] * count


@pytest.mark.parametrize("count", [3, 4])
def test_what_comes_right_after_the_choice_is_not_waited_past(count: int) -> None:
    stages = [replace(stage, just_missed=True) for stage in chain(count, 2, "v")]
    stages[1].delays = {1: 3}
    assert [rank.error for rank in play(stages, 2)] == [None] * count


def test_with_replicas_the_last_microbatch_goes_backward_after_all_others() -> None:
    """Rank 1 gets the last microbatch's gradient first."""

    def gradients_in_reverse(run: Pass) -> None:
        if run.rank.rank == 0:
            run.rank.work("F", run.index, 4)
            run.rank.send(1, 2 - run.index)
        else:
            run.rank.work("F", run.index, 1)
            run.rank.turns.before_backward(run.microbatch, [(0, run.index)])
            run.rank.work("B", run.index, 1)

    def order(*, last_goes_last: bool) -> str:
        policy = loop(3, window=3, last_goes_last=last_goes_last)
        stages = [Stage(loop(3, window=3), range(2)), Stage(policy, range(2))]
        return show(play(stages, 3, gradients_in_reverse)).splitlines()[1]

    assert order(last_goes_last=False) == "rank 1   F0 F1 F2 .  B2 .  .  .  B1 .  .  .  B0"
    assert order(last_goes_last=True) == "rank 1   F0 F1 F2 .  .  .  .  .  B1 .  .  .  B0 B2"


def test_what_keeps_the_order_of_the_microbatches_waits_for_earlier_forwards() -> None:
    """The first microbatch comes back late to rank 0; the second must not overtake it there."""
    order: list[int] = []

    def function(run: Pass) -> None:
        run.forward()
        if run.rank.rank == 0:
            run.rank.turns.wait_for_earlier(run.microbatch)
            order.append(run.index)
        run.backward()

    stages = [Stage(loop(3, window=3), [0, 1, 0]) for _ in range(2)]
    stages[1].delays[0] = 5
    ranks = play(stages, 3, function)
    assert order == [0, 1, 2]
    assert {rank.error for rank in ranks} == {None}


@pytest.mark.parametrize("pipeline", ["interleaved", "simple", "1f1b", "zero_bubble"])
def test_in_a_chain_the_first_microbatch_alone_costs_no_time(pipeline: str) -> None:
    stages = chain(3, 5, pipeline)
    alone = [replace(stage, first_alone=True) for stage in chain(3, 5, pipeline)]
    assert show(play(alone, 5)) == show(play(stages, 5))


@pytest.mark.parametrize("pipeline", ["v", "interleaved", "simple"])
def test_others_begin_when_the_first_microbatch_alone_has_completed_its_forward(pipeline: str) -> None:
    stages = [replace(stage, first_alone=True, route=[0, 1, 1, 0]) for stage in chain(2, 4, pipeline)]
    for row in show(play(stages, 4)).splitlines():
        assert [each for each in row.split()[2:] if each[0] == "F"][:3] == ["F0", "F0", "F1"], row


def test_an_error_of_one_microbatch_ends_the_others_where_they_wait() -> None:
    seen: list[tuple[int, type[BaseException]]] = []

    def function(run: Pass) -> None:
        try:
            run.forward()
            if (run.rank.rank, run.index) == (0, 2):
                run.microbatch.point = "a bad layer"
                raise ValueError("no")
        except BaseException as error:
            if run.rank.rank == 0:
                seen.append((run.index, type(error)))
            raise

    ranks = play([Stage(loop(4, window=4), [0, 1, 0]) for _ in range(2)], 4, function)
    assert isinstance(ranks[0].error, ValueError)
    assert ranks[0].turns.failed is ranks[0].microbatches[2]
    assert seen == [(2, ValueError), (3, StepAborted)]


def test_a_lost_rank_is_reported_with_what_every_microbatch_waited_for() -> None:
    def function(run: Pass) -> None:
        run.microbatch.point = f"layer {run.index}"
        run.forward()

    first, second = (Stage(loop(3, window=2), range(2)) for _ in range(2))
    second.lost = DistBackendError("rank 0 has died")
    error = play([first, second], 3, function)[1].error
    assert isinstance(error, SMPError)
    assert str(error) == (
        "the pipeline stopped: microbatch 0 waits in forward for layer 0; microbatch 1 waits in forward for "
        "layer 1. rank 0 has died"
    )
