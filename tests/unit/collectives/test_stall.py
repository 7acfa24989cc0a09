"""Who has not entered a collective that others wait in."""

from __future__ import annotations

from opensmd.collectives.stall import MemberState, find_stall


def member(rank: int, entered: int, completed: int, state: str = "running") -> MemberState:
    return MemberState(rank, state, entered, completed, f"call {entered}")


def test_a_stall_names_the_collective_and_who_has_not_entered_it() -> None:
    stall = find_stall([member(0, 5, 4), member(1, 4, 4, "stopped"), member(2, 5, 4)])
    assert stall is not None
    assert (stall.sequence, stall.operation, stall.inside) == (5, "call 5", (0, 2))
    assert [one.rank for one in stall.missing] == [1]


def test_ranks_that_are_all_inside_or_all_outside_are_no_stall() -> None:
    assert find_stall([member(0, 5, 4), member(1, 5, 4)]) is None
    assert find_stall([member(0, 5, 5), member(1, 4, 4)]) is None


def test_of_two_stalls_the_earlier_counts() -> None:
    stall = find_stall([member(0, 3, 2), member(1, 7, 6), member(2, 2, 2)])
    assert stall is not None
    assert stall.sequence == 3
    assert stall.inside == (0,)
