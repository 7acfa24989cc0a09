"""The pure parts of the collectives: settings, plans of hosts, stalls."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from opensmd.collectives.flight import Event, chrome_trace, dump
from opensmd.collectives.stall import Member, find_stall
from opensmd.collectives.topology import Identity, make_plan, own_identity
from opensmd.environment.settings import Settings


def identity(host: str, native: str = "") -> Identity:
    return Identity(host, 1, "name", native)


def test_ranks_are_grouped_by_host_in_the_order_of_their_first_ranks() -> None:
    plan = make_plan([identity(host) for host in "baabc"])
    assert plan.islands == ((0, 3), (1, 2), (4,))
    assert not plan.one_host
    assert make_plan([identity("a"), identity("a")]).one_host


def test_ranks_of_one_place_on_their_hosts_are_counterparts() -> None:
    plan = make_plan([identity(host) for host in "babab"])
    assert plan.shares_hosts and plan.crossing == 2
    assert plan.island_of(4) == (0, 2, 4)
    assert [plan.peers_of(rank) for rank in range(5)] == [(0, 1), (0, 1), (2, 3), (2, 3), ()]
    assert not make_plan([identity("a"), identity("b")]).shares_hosts
    assert not make_plan([identity("a"), identity("a")]).shares_hosts


def test_ranks_without_the_core_are_named_with_their_reasons() -> None:
    plan = make_plan([identity("a"), identity("a", "no compiler")])
    assert plan.without_core == {1: "no compiler"}


def test_an_identity_is_this_machines_unless_the_user_gives_one() -> None:
    settings = Settings(cache_dir=Path("/nowhere"))
    assert own_identity(settings) == own_identity(settings)
    given = Settings(cache_dir=Path("/nowhere"), host_id="left")
    assert own_identity(given).host == "left" != own_identity(settings).host


def test_settings_come_from_the_environment() -> None:
    settings = Settings.from_environment(
        {"OPENSMD_CACHE_DIR": "/tmp/x", "OPENSMD_NATIVE": "0", "OPENSMD_HEAP_BYTES": "4096", "CXX": "clang++"}
    )
    assert settings == Settings(Path("/tmp/x"), False, "clang++", None, 4096)
    assert Settings.from_environment({}).native


@pytest.mark.parametrize(
    ("name", "text"),
    [("OPENSMD_NATIVE", "maybe"), ("OPENSMD_HEAP_BYTES", "1 GiB"), ("OPENSMD_HEAP_BYTES", "-1")],
)
def test_settings_that_make_no_sense_are_refused_by_name(name: str, text: str) -> None:
    with pytest.raises(ValueError, match=name):
        Settings.from_environment({name: text})


def test_a_user_without_a_home_is_told_what_to_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HOME")
    monkeypatch.setattr("pwd.getpwuid", lambda number: {}[number])
    with pytest.raises(ValueError, match="OPENSMD_CACHE_DIR"):
        Settings.from_environment({})
    assert Settings.from_environment({"OPENSMD_CACHE_DIR": "/tmp/x"}).cache_dir == Path("/tmp/x")


def member(rank: int, entered: int, completed: int, state: str = "running") -> Member:
    return Member(rank, state, entered, completed, f"call {entered}")


def test_a_stall_names_the_collective_and_who_has_not_entered_it() -> None:
    stall = find_stall([member(0, 5, 4), member(1, 4, 4, "stopped"), member(2, 5, 4)])
    assert stall is not None
    assert (stall.sequence, stall.operation, stall.inside) == (5, "call 5", (0, 2))
    assert [each.rank for each in stall.missing] == [1]


def test_ranks_that_are_all_inside_or_all_outside_are_no_stall() -> None:
    assert find_stall([member(0, 5, 4), member(1, 5, 4)]) is None
    assert find_stall([member(0, 5, 5), member(1, 4, 4)]) is None


def test_of_two_stalls_the_earlier_counts() -> None:
    stall = find_stall([member(0, 3, 2), member(1, 7, 6), member(2, 2, 2)])
    assert stall is not None
    assert stall.sequence == 3
    assert stall.inside == (0,)


def test_a_chrome_trace_has_a_process_a_rank_and_shows_what_is_not_over(tmp_path: Path) -> None:
    events = [
        Event(0, "collectives", "all_reduce", 1000, 3000, {"bytes": 4}),
        Event(1, "pipeline", "forward", 2000, 0),
    ]
    chrome_trace(tmp_path / "trace.json", events)
    trace = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    spans = [each for each in trace if each["ph"] == "X"]
    assert [(each["pid"], each["ts"], each["dur"]) for each in spans] == [(0, 1.0, 2.0), (1, 2.0, 1.0)]
    assert spans[1]["name"] == "forward (not over)"
    dump(tmp_path / "events.jsonl", events)
    lines = (tmp_path / "events.jsonl").read_text().splitlines()
    assert json.loads(lines[0])["name"] == "all_reduce"


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
