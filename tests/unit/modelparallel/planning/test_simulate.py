"""What ranks do that follow their policies, in virtual time: with delays and with slow messages."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Mapping
from dataclasses import replace

import pytest

from opensmd.modelparallel.planning.plan import Crossing, StageLoad
from opensmd.modelparallel.planning.policies.table_order import TableOrder
from opensmd.modelparallel.planning.schedules.one_forward_one_backward import (
    interleaved,
    one_forward_one_backward,
)
from opensmd.modelparallel.planning.schedules.playing import play
from opensmd.modelparallel.planning.schedules.searched import searched
from opensmd.modelparallel.planning.schedules.tables import Action, ChunkTimes, Table, fused, looped
from opensmd.modelparallel.planning.schedules.v import zero_bubble_v
from opensmd.modelparallel.planning.schedules.zero_bubble import zero_bubble_h1
from opensmd.modelparallel.planning.simulate import Part, RankPlayed, play_policies
from tests.support.rank_schedules import rank_schedules

TABLES: dict[str, Callable[[int, int], Table]] = {
    "interleaved": zero_bubble_h1,
    "1f1b": one_forward_one_backward,
    "zero_bubble": zero_bubble_h1,
    "v": zero_bubble_v,
}
UNITS = {"F": 1.0, "B": 1.0, "W": 1.0}


def followed(
    pipeline: str,
    ranks: int,
    microbatches: int,
    *,
    delays: Mapping[tuple[int, Action], float] | None = None,
    sending: float = 0.0,
) -> list[Part]:
    """A step with a forward, a backward and weight gradients of one unit in each stage."""
    table = fused(TABLES[pipeline](ranks, microbatches))
    counted = sorted(itertools.chain(*table.stages))
    played = []
    for schedule, stages in zip(rank_schedules(ranks, pipeline), table.stages, strict=True):
        units = 2.0 if pipeline == "v" and schedule.stage == ranks - 1 else 1.0  # two stages at once
        times = ChunkTimes(units, units, units) if table.splits else ChunkTimes(units, 2 * units, 0.0)
        policy = schedule.policy(microbatches, reduces=False)
        played.append(RankPlayed(policy, [counted.index(stage) for stage in stages], [times] * len(stages)))
    return play_policies(played, microbatches, delays=delays, sending=sending)


def seconds(parts: list[Part]) -> float:
    return max(part.end for part in parts)


@pytest.mark.parametrize(("ranks", "microbatches"), [(2, 8), (3, 9), (4, 16), (8, 32)])
@pytest.mark.parametrize("pipeline", TABLES)
def test_without_delays_a_step_takes_as_long_as_its_table(
    pipeline: str, ranks: int, microbatches: int
) -> None:
    promised = play(TABLES[pipeline](ranks, microbatches), UNITS).seconds  # type: ignore[arg-type]
    assert seconds(followed(pipeline, ranks, microbatches)) <= promised


@pytest.mark.parametrize(("ranks", "microbatches"), [(2, 6), (3, 6), (4, 8)])
@pytest.mark.parametrize("pipeline", TABLES)
def test_a_delay_costs_no_more_than_in_a_fixed_order_and_mostly_less(
    pipeline: str, ranks: int, microbatches: int
) -> None:
    """Any forward or backward of any rank is late once, by one unit or by three."""
    table = fused(TABLES[pipeline](ranks, microbatches))
    units = [1.0] * (1 + max(itertools.chain(*table.stages)))
    if pipeline == "v":
        units[table.stages[-1][0]] = 2.0  # the two stages in the middle, at once
    times = [ChunkTimes(each, each, each) for each in units]
    ours = fixed = 0.0
    for rank, row in enumerate(table.rows):
        for action, late in itertools.product(row, (1.0, 3.0)):
            if action.kind == "W":
                continue
            delays = {(rank, action): late}
            here = seconds(followed(pipeline, ranks, microbatches, delays=delays))
            there = play(table, times, delays=delays).seconds
            assert here <= there, (rank, action, late)
            ours, fixed = ours + here, fixed + there
    assert ours < fixed or pipeline == "v"


def test_forwards_and_backwards_alternate_when_a_rank_has_been_late() -> None:
    """Rank 1 shall not wait for the forward that was allowed after the first of three backwards."""
    parts = followed("1f1b", 2, 6, delays={(0, Action("B", 0)): 6.0})
    first = [f"{part.kind}{part.microbatch}" for part in parts if part.stage == 0]
    assert first[:8] == ["F0", "F1", "F2", "B0", "B1", "F3", "B2", "F4"]


@pytest.mark.parametrize(("ranks", "microbatches", "share"), [(2, 8, 0.97), (4, 16, 0.95), (8, 32, 0.95)])
def test_a_v_hardly_waits_although_messages_take_their_time(
    ranks: int, microbatches: int, share: float
) -> None:
    parts = followed("v", ranks, microbatches, sending=0.02)
    assert sum(part.end - part.start for part in parts) / ranks / seconds(parts) >= share


@pytest.mark.parametrize(("ranks", "microbatches"), [(2, 8), (3, 7), (5, 6), (4, 3), (4, 16)])
def test_what_comes_first_in_the_row_is_found_without_looking_at_all_microbatches(
    monkeypatch: pytest.MonkeyPatch, ranks: int, microbatches: int
) -> None:
    """Whatever is late, ranks do what they do when they look at everything."""
    draw = random.Random(ranks)
    rows = enumerate(fused(zero_bubble_v(ranks, microbatches)).rows)
    delays = {(rank, action): draw.expovariate(5.0) for rank, row in rows for action in row}
    quick = followed("v", ranks, microbatches, delays=delays, sending=0.1)
    monkeypatch.setattr(TableOrder, "_at_place", lambda *_: None)
    assert followed("v", ranks, microbatches, delays=delays, sending=0.1) == quick


def test_a_searched_order_is_followed_and_beats_that_of_even_stages() -> None:
    """Three ranks whose parts take unlike times, with memory for three microbatches each."""
    times = [ChunkTimes(2, 3, 0), ChunkTimes(2, 3, 1), ChunkTimes(2, 1, 2)]
    loads = tuple(
        StageLoad(
            forward_seconds=each.forward,
            backward_seconds=each.backward + each.weights,
            late_seconds=each.weights,
            late=1 if each.weights else 0,
        )
        for each in times
    )

    def step(pipeline: str) -> float:
        played = []
        for schedule, own in zip(rank_schedules(3, pipeline, active_microbatches=3), times, strict=True):
            schedule = replace(schedule, plan=replace(schedule.plan, loads=loads))
            played.append(RankPlayed(schedule.policy(6, reduces=False), [schedule.stage], [own]))
        return seconds(play_policies(played, 6))

    promised = play(searched(looped(3), times, 6, most_kept=3), times).seconds
    assert step("searched") <= promised < step("zero_bubble")


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_pieces_in_a_loop_keep_no_more_than_their_table_whatever_is_late(ranks: int) -> None:
    """Weight gradients that fill waits give memory back before any forward needs it."""
    microbatches = 3 * ranks
    table = interleaved(ranks, microbatches, chunks=2)
    for seed in range(40):
        draw = random.Random(seed)
        late = {
            (rank, action): draw.expovariate(1 / 3)
            for rank, row in enumerate(table.rows)
            for action in row
            if draw.random() < 0.3
        }
        parts = in_a_loop(table, microbatches, late)
        kept = [most_kept([part for part in parts if part.stage % ranks == rank]) for rank in range(ranks)]
        assert all(most <= bound for most, bound in zip(kept, play(table, UNITS).kept, strict=True)), seed  # type: ignore[arg-type]


def in_a_loop(table: Table, microbatches: int, delays: Mapping[tuple[int, Action], float]) -> list[Part]:
    """A step of ranks with two stages each, whose weight gradients have no place in the table."""
    ranks = len(table.rows)
    back = Crossing(source=ranks - 1, target=0, tensors=1, bytes=4)
    played = []
    for schedule, stages in zip(rank_schedules(ranks, virtual_stages=2), table.stages, strict=True):
        plan = replace(schedule.plan, crossings=(*schedule.plan.crossings, back))
        policy = replace(schedule, plan=plan).policy(microbatches, reduces=False)
        played.append(RankPlayed(policy, stages, [ChunkTimes(1, 1, 1)] * len(stages)))
    return play_policies(played, microbatches, delays=delays, sending=0.1)


def most_kept(parts: list[Part]) -> int:
    """How many activations a rank keeps at once: from a forward to its weight gradients."""
    change = {"F": 1, "B": 0, "W": -1}
    return max(itertools.accumulate(change[part.kind] for part in parts))
