"""Schedules as tables: the published ones for a few ranks, and what is promised of them for any."""

from __future__ import annotations

import textwrap

import pytest
from hypothesis import given
from hypothesis import strategies as st

from opensmd.modelparallel.planning.schedules.fill_drain import fill_drain
from opensmd.modelparallel.planning.schedules.one_forward_one_backward import (
    interleaved,
    one_forward_one_backward,
)
from opensmd.modelparallel.planning.schedules.playing import play
from opensmd.modelparallel.planning.schedules.tables import Action, Kind, Table, fused, in_a_v, looped
from opensmd.modelparallel.planning.schedules.v import zero_bubble_v
from opensmd.modelparallel.planning.schedules.zero_bubble import zero_bubble, zero_bubble_h1, zero_bubble_h2

ALIKE: dict[Kind, float] = {"F": 1, "B": 1, "W": 1}

# Rank by rank as in the figures: of GPipe and 1F1B in arXiv:2104.04473, of H1 and H2 in arXiv:2401.10241
# (there counted from 1), of V in its section 6 and as torch.distributed.pipelining has it.
PUBLISHED = {
    "fill-drain": (
        fill_drain(2, 3),
        """
        F0 F1 F2 .  .  .  B0 B0 B1 B1 B2 B2
        .  F0 F1 F2 B0 B0 B1 B1 B2 B2
        """,
    ),
    "1F1B": (
        one_forward_one_backward(4, 8),
        """
        F0 F1 F2 F3 .  .  .  .  .  .  B0 B0 F4 B1 B1 F5 B2 B2 F6 B3 B3 F7 B4 B4 .  B5 B5 .  B6 B6 .  B7 B7
        .  F0 F1 F2 .  .  .  .  B0 B0 F3 B1 B1 F4 B2 B2 F5 B3 B3 F6 B4 B4 F7 B5 B5 .  B6 B6 .  B7 B7
        .  .  F0 F1 .  .  B0 B0 F2 B1 B1 F3 B2 B2 F4 B3 B3 F5 B4 B4 F6 B5 B5 F7 B6 B6 .  B7 B7
        .  .  .  F0 B0 B0 F1 B1 B1 F2 B2 B2 F3 B3 B3 F4 B4 B4 F5 B5 B5 F6 B6 B6 F7 B7 B7
        """,
    ),
    "H1": (
        zero_bubble_h1(4, 8),
        """
        F0 F1 F2 F3 .  .  .  B0 W0 F4 B1 W1 F5 B2 W2 F6 B3 W3 F7 B4 W4 B5 W5 B6 W6 B7 W7
        .  F0 F1 F2 .  .  B0 F3 B1 W0 F4 B2 W1 F5 B3 W2 F6 B4 W3 F7 B5 W4 B6 W5 B7 W6 W7
        .  .  F0 F1 .  B0 F2 B1 F3 B2 W0 F4 B3 W1 F5 B4 W2 F6 B5 W3 F7 B6 W4 B7 W5 W6 W7
        .  .  .  F0 B0 F1 B1 F2 B2 F3 B3 W0 F4 B4 W1 F5 B5 W2 F6 B6 W3 F7 B7 W4 W5 W6 W7
        """,
    ),
    "H2": (
        zero_bubble_h2(4, 8),
        """
        F0 F1 F2 F3 F4 F5 F6 B0 W0 F7 B1 W1 B2 W2 B3 W3 B4 W4 B5 W5 B6 W6 B7 W7
        .  F0 F1 F2 F3 F4 B0 F5 B1 F6 B2 W0 F7 B3 W1 B4 W2 B5 W3 B6 W4 B7 W5 W6 W7
        .  .  F0 F1 F2 B0 F3 B1 F4 B2 F5 B3 F6 B4 W0 F7 B5 W1 B6 W2 B7 W3 W4 W5 W6 W7
        .  .  .  F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 F5 B5 F6 B6 W0 F7 B7 W1 W2 W3 W4 W5 W6 W7
        """,
    ),
}
ORDERS = {
    "interleaved": (
        interleaved(2, 4, chunks=2),
        """
        rank 0   F0 F1 F0a F1a F2 B0a F3 B1a F2a B0 F3a B1 B2a B3a B2 B3
        rank 1   F0 F1 F0a B0a F1a B1a F2 B0 F3 B1 F2a B2a F3a B3a B2 B3
        """,
    ),
    "V": (
        zero_bubble_v(2, 4),
        """
        rank 0   F0 F1 F2 F0a B0a W0a F1a B1a W1a F3 B0 W0 F2a B2a W2a B1 W1 F3a B3a W3a B2 W2 B3 W3
        rank 1   F0 F0a F1 F1a B0a W0a F2 B0 W0 F2a B1a W1a F3 B1 W1 F3a B2a W2a B2 B3a B3 W2 W3a W3
        """,
    ),
}


def picture(text: str) -> str:
    return textwrap.dedent(text).strip()


@pytest.mark.parametrize("name", PUBLISHED)
def test_tables_are_played_as_published(name: str) -> None:
    table, drawn = PUBLISHED[name]
    assert play(table, ALIKE).chart() == picture(drawn)


@pytest.mark.parametrize("name", ORDERS)
def test_ranks_with_several_chunks_have_the_published_order(name: str) -> None:
    table, order = ORDERS[name]
    assert str(table) == picture(order)


def test_stages_are_looped_or_in_a_v() -> None:
    assert looped(2, 2) == ((0, 2), (1, 3))
    assert in_a_v(2) == ((0, 3), (1, 2))


RANKS = st.integers(1, 8)
ROUNDS = st.integers(2, 5)
TIMES = st.fixed_dictionaries({kind: st.integers(1, 5) for kind in ("F", "B", "W")})


def all_tables(ranks: int, microbatches: int) -> list[Table]:
    return [
        fill_drain(ranks, microbatches),
        one_forward_one_backward(ranks, microbatches),
        zero_bubble_h1(ranks, microbatches),
        zero_bubble(ranks, microbatches, min(1, ranks - 1)),
        zero_bubble_h2(ranks, microbatches),
        zero_bubble_v(ranks, microbatches),
        interleaved(ranks, -(-microbatches // ranks) * ranks, chunks=3),
    ]


@given(ranks=RANKS, microbatches=st.integers(1, 20), times=TIMES)
def test_every_table_can_be_followed_and_leaves_nothing_out(
    ranks: int, microbatches: int, times: dict[Kind, float]
) -> None:
    for table in all_tables(ranks, microbatches):
        play(table, times, sending=1)
        count = 1 + max(action.microbatch for action in table.rows[0])
        wanted = {
            Action(kind, microbatch, chunk)
            for kind in (("F", "B", "W") if table.splits else ("F", "B"))
            for microbatch in range(count)
            for chunk in range(len(table.stages[0]))
        }
        for row in table.rows:
            assert len(row) == len(wanted) and set(row) == wanted


@given(ranks=RANKS, rounds=ROUNDS, times=TIMES)
def test_bubbles_and_kept_activations_are_those_of_the_papers(
    ranks: int, rounds: int, times: dict[Kind, float]
) -> None:
    microbatches, others = rounds * ranks, ranks - 1
    forward, backward, weights = times["F"], times["B"], times["W"]
    work = microbatches * (forward + backward + weights)

    filled = play(fill_drain(ranks, microbatches), times)
    assert filled.seconds == work + others * (forward + backward + weights)
    assert filled.kept == [microbatches] * ranks

    plain = play(one_forward_one_backward(ranks, microbatches), times)
    assert plain.seconds == work + others * (forward + backward + weights)
    assert plain.kept == [ranks - rank for rank in range(ranks)]

    several = play(interleaved(ranks, microbatches, chunks=2), times)
    assert several.seconds == 2 * work + others * (forward + backward + weights)  # of half a stage each


@given(ranks=RANKS, rounds=ROUNDS)
def test_zero_bubble_tables_keep_their_promise_where_all_actions_take_as_long(
    ranks: int, rounds: int
) -> None:
    microbatches, others = rounds * ranks, ranks - 1
    first = play(zero_bubble_h1(ranks, microbatches), ALIKE)
    assert first.seconds == 3 * microbatches + others
    assert max(first.kept) == ranks
    second = play(zero_bubble_h2(ranks, microbatches), ALIKE)
    assert second.idle == [0] * ranks
    assert max(second.kept) == 2 * ranks - 1
    for more in range(ranks):
        between = play(zero_bubble(ranks, microbatches, more), ALIKE)
        assert (between.seconds, max(between.kept)) == (first.seconds, min(ranks + more, microbatches))
    third = play(zero_bubble_v(ranks, microbatches), ALIKE)
    assert third.idle == [0] * ranks
    assert max(third.kept) <= 2 * ranks  # of half a stage each: as many as 1F1B


def test_a_table_that_cannot_be_followed_says_where_ranks_wait() -> None:
    backward_first = (Action("B", 0), Action("F", 0))
    table = Table("upside down", ((Action("F", 0), Action("B", 0)), backward_first), looped(2))
    with pytest.raises(
        ValueError, match=r"upside down: ranks wait for each other \(rank 0 at B0, rank 1 at B0\)"
    ):
        play(table, ALIKE)


def test_tables_of_nothing_and_of_odd_groups_are_refused() -> None:
    with pytest.raises(ValueError, match="at least one rank, microbatch and chunk, got 0, 4 and 1"):
        one_forward_one_backward(0, 4)
    with pytest.raises(ValueError, match="3 ranks do not divide 4 microbatches"):
        interleaved(3, 4, chunks=2)


def test_stages_that_follow_each_other_on_a_rank_are_one_when_they_are_fused() -> None:
    table = fused(zero_bubble_v(2, 3))
    assert table.stages == ((0, 2), (1,))
    assert max(play(table, ALIKE).kept) == 4
    assert table.rows[0] == zero_bubble_v(2, 3).rows[0]
    assert " ".join(map(str, table.rows[1])) == "F0 F1 B0 W0 F2 B1 W1 B2 W2"
