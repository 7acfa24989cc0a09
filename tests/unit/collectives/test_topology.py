"""Which ranks share a host, from what each says of itself."""

from __future__ import annotations

from pathlib import Path

import pytest

from opensmd.collectives.topology import Identity, make_plan, own_identity
from opensmd.environment.settings import Settings


def identity(host: str, native: str = "") -> Identity:
    return Identity(host, 1, "name", native)


def test_ranks_are_grouped_by_host_in_the_order_of_their_first_ranks() -> None:
    plan = make_plan([identity(host) for host in "baabc"])
    assert plan.local_groups == ((0, 3), (1, 2), (4,))
    assert not plan.one_host
    assert make_plan([identity("a"), identity("a")]).one_host


def test_a_plan_says_whether_ranks_of_several_hosts_share_one() -> None:
    plan = make_plan([identity(host) for host in "babab"])
    assert plan.shares_hosts
    assert plan.local_group_of(4) == (0, 2, 4)
    assert not make_plan([identity("a"), identity("b")]).shares_hosts
    assert not make_plan([identity("a"), identity("a")]).shares_hosts


def test_ranks_without_the_core_are_named_with_their_reasons() -> None:
    plan = make_plan([identity("a"), identity("a", "no compiler")])
    assert plan.without_core == {1: "no compiler"}


def test_ranks_of_a_host_share_the_cpus_that_any_of_them_may_use_within_their_quota() -> None:
    masks = {"pinned": (0b01, 0b10), "together": (0b11, 0b11), "one": (0b100, 0b100)}
    members = {host: [Identity(host, 1, "name", cpus=mask) for mask in of] for host, of in masks.items()}
    of_quota = [Identity("quota", 1, "name", cpus=0b1111, quota=quota) for quota in (None, 2.5)]
    plan = make_plan([*members["pinned"], *members["together"], *members["one"], *of_quota])
    assert plan.cores == (2, 2, 1, 2)
    assert [plan.cores_of(rank) for rank in (1, 5, 7)] == [2, 1, 2]


def test_an_identity_is_this_machines_unless_the_user_gives_one() -> None:
    settings = Settings(cache_dir=Path("/nowhere"))
    assert own_identity(settings) == own_identity(settings)
    given = Settings(cache_dir=Path("/nowhere"), host_id="left")
    assert own_identity(given).host == "left" != own_identity(settings).host


@pytest.mark.parametrize(
    ("networks", "loopbacks", "hidden", "cut_off"),
    [
        ("aab", [True, True, True], (0, 1, 2), True),
        ("aab", [True, True, False], (0, 1), False),
        ("aaa", [True, True, True], (), False),
    ],
)
def test_ranks_on_the_loopback_of_another_network_are_known_before_gloo_connects(
    networks: str, loopbacks: list[bool], hidden: tuple[int, ...], cut_off: bool
) -> None:
    places = zip(networks, loopbacks, strict=True)
    plan = make_plan([Identity(host, 1, "node", "", host, loopback) for host, loopback in places])
    assert (plan.hidden, plan.cut_off) == (hidden, cut_off)
