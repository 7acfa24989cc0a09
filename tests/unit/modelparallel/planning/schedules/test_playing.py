"""Tables in time: who waits for whom, how long, and what is kept meanwhile."""

from __future__ import annotations

import pytest

from opensmd.modelparallel.planning.schedules.playing import play
from opensmd.modelparallel.planning.schedules.tables import Action, ChunkTimes, Kind, Table

UNIT: dict[Kind, float] = {"F": 1.0, "B": 1.0, "W": 1.0}


def table(*rows: str) -> Table:
    """Of actions such as ``F0``, one chunk a rank."""
    actions = (tuple(Action(word[0], int(word[1:])) for word in row.split()) for row in rows)  # type: ignore[arg-type]
    return Table("small", tuple(actions), tuple((rank,) for rank in range(len(rows))))


TWO = table("F0 F1 B0 W0 B1 W1", "F0 B0 W0 F1 B1 W1")


def test_an_action_begins_when_its_rank_is_free_and_what_it_needs_is_there() -> None:
    played = play(TWO, UNIT)
    assert played.chart() == "F0 F1 .  B0 W0 .  B1 W1\n.  F0 B0 W0 F1 B1 W1"
    assert played.seconds == 8 and played.idle == [2, 0]


def test_a_tensor_between_ranks_takes_its_time_and_one_on_the_same_rank_none() -> None:
    assert play(TWO, UNIT, sending=1.0).rows[1][0].start == 2.0
    alone = Table("one", ((Action("F", 0), Action("F", 0, 1)),), ((0, 1),))
    assert play(alone, UNIT, sending=1.0).seconds == 2.0


def test_a_backward_that_computes_weight_gradients_takes_both_times() -> None:
    played = play(table("F0 B0"), {"F": 1.0, "B": 2.0, "W": 3.0})
    assert [timed.end for timed in played.rows[0]] == [1.0, 6.0]


def test_stages_have_times_of_their_own_and_actions_may_be_late() -> None:
    times = [ChunkTimes(1.0, 1.0, 1.0), ChunkTimes(4.0, 1.0, 1.0)]
    assert play(table("F0", "F0"), times).seconds == 5.0
    assert play(table("F0", "F0"), times, delays={(0, Action("F", 0)): 2.5}).seconds == 7.5


def test_activations_are_kept_until_the_weight_gradients_or_the_backward_that_has_them() -> None:
    assert play(table("F0 F1 B0 F2 B1 B2 W0 W1 W2"), UNIT).kept == [3]
    assert play(table("F0 F1 B0 F2 B1 B2"), UNIT).kept == [2]


def test_ranks_that_wait_for_each_other_are_named_with_what_they_wait_at() -> None:
    with pytest.raises(ValueError, match=r"small: ranks wait for each other \(rank 0 at B0, rank 1 at B0\)"):
        play(table("F1 B0 F0", "F1 B0 F0"), UNIT)
