"""The clocks of hosts, as told by what their ranks did together."""

from __future__ import annotations

from opensmd.timeline.clocks import HostClock, differences
from opensmd.timeline.span import COLLECTIVES, Span


def together(start: int, end: int, call: str = "world/1", name: str = "all_reduce") -> list[Span]:
    return [Span(COLLECTIVES, name, start, end, call=call)]


def test_wall_clocks_count_where_nothing_contradicts_them() -> None:
    hosts = {"a": HostClock(1000, {0: together(0, 100)}), "b": HostClock(3000, {1: together(-2010, -1890)})}
    assert differences(hosts) == {"a": 0, "b": 2000}
    assert differences({"a": HostClock(5, {0: []}), "b": HostClock(7, {1: []})}) == {"a": 0, "b": 2}


def test_nobody_leaves_a_collective_before_all_have_entered() -> None:
    hosts = {"a": HostClock(0, {0: together(0, 100)}), "b": HostClock(0, {1: together(5000, 5100)})}
    assert differences(hosts) == {"a": 0, "b": -4900}  # at the most: b enters just before a leaves
    hosts = {"a": HostClock(0, {0: together(5000, 5100)}), "b": HostClock(0, {1: together(0, 100)})}
    assert differences(hosts)["b"] == 4900


def test_the_last_to_enter_and_the_first_to_leave_of_a_host_count() -> None:
    a = HostClock(0, {0: together(0, 100), 1: together(80, 90)})
    assert differences({"a": a, "b": HostClock(0, {2: together(5000, 5100)})})["b"] == 90 - 5000


def test_many_collectives_narrow_the_difference_down() -> None:
    here = together(0, 1000) + together(2000, 2900, "world/2")
    there = together(10_000, 10_100) + together(12_850, 12_950, "world/2")
    assert differences({"a": HostClock(0, {0: here}), "b": HostClock(0, {1: there})})["b"] == 2900 - 12_850


def test_what_does_not_need_all_ranks_says_nothing() -> None:
    for name, call in (("broadcast", "world/1"), ("all_reduce", "world/cuda/1"), ("all_reduce", "")):
        a, b = together(0, 100, call, name), together(5000, 5100, call, name)
        assert differences({"a": HostClock(0, {0: a}), "b": HostClock(0, {1: b})})["b"] == 0


def test_clocks_that_do_not_run_alike_are_left_to_the_wall_clocks() -> None:
    here = together(0, 10) + together(10_000, 10_010, "world/2")
    there = together(0, 10) + together(20_000, 20_010, "world/2")
    assert differences({"a": HostClock(0, {0: here}), "b": HostClock(3, {1: there})})["b"] == 3


def test_a_collective_whose_end_nobody_knows_says_nothing_of_clocks() -> None:
    hosts = {"a": HostClock(0, {0: together(0, 0)}), "b": HostClock(0, {1: together(5000, 5100)})}
    assert differences(hosts) == {"a": 0, "b": 0}
