"""Predicted times of all_reduces between hosts: bytes, limits, and what changes with the number of hosts."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from opensmd.collectives.hosts.cost_model import (
    ALGORITHMS,
    MIB,
    SHARES,
    Cluster,
    predict,
    predict_buckets,
)

SLOW = Cluster(hosts=2, ranks=2, link=119e6)  # 1 Gbit/s


def test_bytes_over_the_busiest_link_are_those_of_the_algorithms() -> None:
    for hosts in (2, 4, 16):
        cluster = replace(SLOW, hosts=hosts)
        ranks = 2 * hosts
        assert predict("levels", cluster, 64 * MIB).crossing == pytest.approx(128 * MIB * (hosts - 1) / hosts)
        assert predict("ring", cluster, 64 * MIB).crossing == pytest.approx(128 * MIB * (ranks - 1) / ranks)
        assert predict("tree", cluster, 64 * MIB).crossing == 64 * MIB
    exact, int8 = (predict(name, SLOW, 64 * MIB).crossing for name in ("levels", "levels, int8"))
    assert int8 / exact == pytest.approx(SHARES["int8"]) == pytest.approx(0.254, abs=1e-3)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_slow_link_is_what_counts_and_a_fast_one_is_not(algorithm: str) -> None:
    slow, slower = (predict(algorithm, replace(SLOW, link=link), 64 * MIB) for link in (1e6, 0.5e6))
    assert 1 <= slow.seconds / (slow.crossing / 1e6) < 2.4  # a tree carries down what it has carried up
    assert slower.seconds / slow.seconds == pytest.approx(2, rel=0.01)
    fast, faster = (predict(algorithm, replace(SLOW, link=link), 64 * MIB) for link in (1e15, 2e15))
    assert faster.seconds == pytest.approx(fast.seconds, rel=0.01)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_more_bytes_never_take_less_time(algorithm: str) -> None:
    for hosts in (1, 2, 4, 1000, 10_000):
        seconds = [
            predict(algorithm, replace(SLOW, hosts=hosts), 2.0**power).seconds for power in range(2, 31)
        ]
        # Small calls go another way than large ones, which may be a little dearer where the one ends.
        assert all(after > 0.7 * before for before, after in itertools.pairwise(seconds))
        assert seconds[-1] > 10 * seconds[0] > 0


def test_compression_pays_where_the_link_is_slow_and_not_where_it_is_fast() -> None:
    def gain(gigabits: float) -> float:
        cluster = replace(SLOW, link=gigabits * 119e6)
        return (
            predict("levels", cluster, 25 * MIB).seconds / predict("levels, int8", cluster, 25 * MIB).seconds
        )

    assert gain(1) > 2.5 and gain(100) < 1
    assert gain(1) > gain(10) > gain(100)


def test_many_hosts_turn_the_exchange_of_all_with_all_into_messages() -> None:
    """Which is why a ring, or a tree, is the faster one from some number of hosts on."""
    fast = Cluster(hosts=2, ranks=8, link=12e9, memory=20e9, sockets=10e9)

    def fastest(hosts: int) -> str:
        cluster = replace(fast, hosts=hosts)
        return min(("ring", "tree", "levels"), key=lambda name: predict(name, cluster, 25 * MIB).seconds)

    assert fastest(2) == fastest(4) == "levels"
    assert fastest(10_000) == "tree"


def test_one_host_and_one_rank_have_nothing_to_send() -> None:
    alone = Cluster(hosts=1, ranks=4, link=1e9)
    for name in ALGORITHMS:
        assert predict(name, alone, MIB).crossing == 0 < predict(name, alone, MIB).seconds
        assert predict(name, replace(alone, ranks=1), MIB).seconds == 0
        assert predict(name, SLOW, 0).seconds == 0


def test_buckets_follow_one_another() -> None:
    whole = predict_buckets("levels", SLOW, 100 * MIB, 25 * MIB)
    assert whole.seconds == 4 * predict("levels", SLOW, 25 * MIB).seconds
    assert predict_buckets("levels", SLOW, 10, 25 * MIB) == predict("levels", SLOW, 10)


@pytest.mark.parametrize("wrong", [{"hosts": 0}, {"link": 0.0}, {"delay": -1.0}])
def test_clusters_that_cannot_be_are_refused_by_name(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=f"{next(iter(wrong))} must"):
        replace(SLOW, **wrong)  # type: ignore[arg-type]
