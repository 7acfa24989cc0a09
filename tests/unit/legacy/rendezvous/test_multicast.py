"""Whose store is used: the same decision wherever it is made."""

from __future__ import annotations

from opensmd.legacy.rendezvous.multicast import Announcement, choose_leader


def heard(*tokens: str, leader: str = "", world_size: int = 2) -> dict[str, Announcement]:
    return {token: Announcement(token, world_size, "", leader) for token in tokens}


def test_all_go_to_the_smallest_token_once_enough_were_heard() -> None:
    assert choose_leader(heard("b"), heard("b")["b"]) is None
    everyone = heard("b", "a")
    assert choose_leader(everyone, everyone["b"]) == everyone["a"]


def test_who_comes_too_late_follows_the_others_instead_of_splitting_them() -> None:
    others = heard("c", "b", leader="b")
    mine = heard("a")
    leader = choose_leader({**others, **mine}, mine["a"])
    assert leader is not None and leader.token == "b"


def test_a_leader_that_was_not_heard_yet_is_waited_for() -> None:
    follower, mine = heard("a", leader="b", world_size=3), heard("c", world_size=4)
    assert choose_leader({**follower, **mine}, mine["c"]) is None
    leader = heard("b", leader="b", world_size=3)
    assert choose_leader({**follower, **leader, **mine}, mine["c"]) == leader["b"]


def test_another_world_size_is_reason_enough_to_meet() -> None:
    both = {**heard("a", world_size=3), **heard("b", world_size=4)}
    assert choose_leader(both, both["b"]) == both["a"]
