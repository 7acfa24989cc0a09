"""From which sizes on collectives between hosts go another way, by what is known of the network."""

from __future__ import annotations

from dataclasses import replace

from opensmd.collectives.hosts.choices import (
    LEAST_CARRIED,
    LEAST_OF_PIECE,
    NEVER,
    Thresholds,
    in_words,
    thresholds,
)
from opensmd.collectives.hosts.cost_model import (
    LEAST_OF_RING,
    LEAST_OF_SUM,
    LEAST_OF_TURN,
    MIB,
    MOST_OF_SUM,
    Cluster,
    all_at_once,
    in_parts,
    in_ring,
    may_take_turns,
    most_carried,
    predict,
)

SLOW = Cluster(hosts=4, ranks=2, link=119e6)  # 1 Gbit/s


def thresholds_of(cluster: Cluster) -> Thresholds:
    return thresholds(cluster, usual=cluster)


def test_more_goes_with_the_comparison_where_waiting_is_dear_and_less_where_bytes_are() -> None:
    near, far = (thresholds_of(replace(SLOW, delay=delay)).carried for delay in (1e-6, 1e-3))
    slow, fast = (thresholds_of(replace(SLOW, link=link)).carried for link in (1e7, 1e10))
    assert LEAST_CARRIED <= near < far == most_carried(4)
    assert LEAST_CARRIED == slow < fast <= most_carried(4)
    assert thresholds_of(replace(SLOW, hosts=2)).carried == most_carried(2)
    assert thresholds_of(replace(SLOW, hosts=1000)).carried <= most_carried(1000)


def test_hosts_take_turns_from_where_waiting_is_cheaper_than_crowded_links() -> None:
    one = replace(SLOW, ranks=1)
    near, far = (thresholds_of(replace(one, delay=delay)) for delay in (40e-6, 1e-3))
    assert near.ring_from < 96 << 10 < MIB // 2 < far.ring_from < MIB
    assert near.ring_from <= near.turns_from < 128 << 10
    assert far.turns_from == NEVER  # many parts are late for each other
    assert thresholds_of(replace(one, link=10 * one.link)).ring_from > 4 * near.ring_from
    for size in (near.ring_from, far.ring_from):
        assert in_parts(one, size).seconds <= min(all_at_once(one, size).seconds, in_ring(one, size).seconds)
    for hosts in (2, 64):
        chosen = thresholds_of(replace(SLOW, hosts=hosts))
        assert chosen.ring_from == chosen.turns_from == NEVER


def test_parts_and_pieces_are_larger_the_faster_the_link_and_pieces_the_longer_the_way() -> None:
    one = replace(SLOW, ranks=1)
    near, far = (thresholds_of(replace(one, delay=delay)).piece for delay in (40e-6, 1e-3))
    assert LEAST_OF_PIECE < near == 64 << 10 < far < NEVER
    assert near < thresholds_of(replace(one, link=2 * one.link)).piece < NEVER
    assert thresholds_of(replace(one, link=1e3)).piece == LEAST_OF_PIECE
    assert thresholds_of(SLOW).piece == near
    for whole in (replace(SLOW, link=10 * SLOW.link), replace(SLOW, hosts=2)):
        assert thresholds_of(whole).piece == NEVER
    slow, fast = (thresholds_of(replace(SLOW, link=link)).least_part for link in (SLOW.link, 10 * SLOW.link))
    assert slow == LEAST_OF_SUM < fast == MOST_OF_SUM


def test_what_hosts_take_turns_with_is_never_carried_with_the_comparison() -> None:
    for hosts in range(3, 40):
        cluster = replace(SLOW, hosts=hosts, ranks=1)
        for least in (LEAST_OF_RING, LEAST_OF_TURN):
            assert not may_take_turns(cluster, most_carried(hosts), least)


def test_a_tree_is_taken_from_where_it_is_faster_at_all_larger_sizes() -> None:
    for hosts in (2, 4, 64):
        assert thresholds_of(replace(SLOW, hosts=hosts)).tree_from == NEVER
    many = Cluster(hosts=4000, ranks=8, link=1.2e9)
    found = thresholds_of(many).tree_from
    assert MIB <= found < NEVER
    for size in (found, 256 * MIB):
        assert predict("tree", many, size).seconds < predict("levels", many, size).seconds


def test_what_was_measured_does_not_choose_between_ways_whose_results_differ() -> None:
    usual = replace(SLOW, ranks=1)
    instant = replace(usual, link=100e9, delay=0.0)
    assert thresholds_of(instant).tree_from < NEVER
    assert thresholds(instant, usual=usual).tree_from == NEVER
    assert thresholds(instant, usual=usual).carried == thresholds_of(instant).carried


def test_what_is_known_is_said_with_how_it_is_known_and_what_follows() -> None:
    said = in_words(SLOW, thresholds_of(SLOW), ["delay"])
    assert "4 hosts of 2 ranks; link 0.952 Gbit/s, delay 20 us (measured), memory 5 GB/s" in said
    assert f"up to {thresholds_of(SLOW).carried / 1024:g} KiB" in said and "from no size on" in said
