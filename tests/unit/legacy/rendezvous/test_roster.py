"""Who gets which rank, and what is missing or contradicts."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from opensmd.legacy.rendezvous.host import Process
from opensmd.legacy.rendezvous.roster import Member, assign_ranks, contradiction, missing_ranks

HERE = Process(100, 1.0, "host", "space", "space")


def members(*ranks: int, world_size: int | None = None) -> list[Member]:
    size = len(ranks) if world_size is None else world_size
    return [Member(replace(HERE, pid=100 + index), rank, size) for index, rank in enumerate(ranks)]


@given(st.integers(1, 8).flatmap(lambda n: st.permutations(range(n))), st.data())
def test_every_process_gets_its_own_rank_and_the_one_it_asked_for(
    order: list[int], data: st.DataObject
) -> None:
    wanted = [rank if data.draw(st.booleans()) else -1 for rank in order]
    roster = members(*wanted)
    assert contradiction(roster) is None
    given_ranks = assign_ranks(roster)
    assert sorted(given_ranks) == list(range(len(order)))
    assert all(want in (-1, got) for want, got in zip(wanted, given_ranks, strict=True))
    free = [got for want, got in zip(wanted, given_ranks, strict=True) if want == -1]
    assert free == sorted(free), "those who asked for none are served in order of arrival"


def test_what_contradicts_is_named_with_both_processes() -> None:
    twice = contradiction(members(0, 1, 1))
    assert twice is not None and "rank 1 was taken twice, by process 101 on host and process 102" in twice
    assert "asks for rank 5; expected 0 to 2" in str(contradiction(members(0, 5, 1)))
    unequal = [*members(0, world_size=2), *members(1, world_size=3)]
    assert "world_size 2" in str(contradiction(unequal)) and "with 3" in str(contradiction(unequal))


def test_who_is_missing_is_said_as_exactly_as_can_be() -> None:
    assert missing_ranks(members(0, 2, world_size=4), 4) == "ranks 1, 3"
    assert missing_ranks(members(1, world_size=2), 2) == "rank 0"
    assert missing_ranks(members(-1, 2, world_size=4), 4) == "2 processes"
    assert missing_ranks(members(-1, world_size=2), 2) == "one process"


def test_a_member_and_a_process_survive_the_store() -> None:
    member = Member(Process.this(), 3, 4)
    assert Member.from_json(member.to_json()) == member
    assert not member.process.is_known_dead()
    assert replace(member.process, born=member.process.born - 1000).is_known_dead(), "a pid can be used again"
    assert not replace(member.process, pid=2**22 + 1, pid_space="another host").is_known_dead()
