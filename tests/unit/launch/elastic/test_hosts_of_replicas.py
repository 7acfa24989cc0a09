"""The smdruns of several hosts: who has replicas left, and that host 0 stays for the others."""

from __future__ import annotations

import threading
import time

import pytest

from opensmd.collectives.stores.listening import LOOPBACK
from opensmd.launch.elastic import hosts_of_replicas
from opensmd.launch.elastic.hosts_of_replicas import HostPlace, HostsOfReplicas
from tests.support.patience import PATIENCE


def two_hosts() -> tuple[HostsOfReplicas, HostsOfReplicas]:
    first = HostsOfReplicas(HostPlace(0, 2, LOOPBACK, 0))
    port = int(first.address.rpartition(":")[2])
    return first, HostsOfReplicas(HostPlace(1, 2, LOOPBACK, port))


def test_a_host_goes_on_until_it_says_that_it_has_no_replica_left() -> None:
    first, second = two_hosts()
    assert first.others_have_replicas() and second.others_have_replicas()
    second.has_no_replica_left()
    assert not first.others_have_replicas() and second.others_have_replicas()
    assert not HostsOfReplicas(HostPlace()).others_have_replicas()


def test_a_host_that_is_heard_no_more_counts_as_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hosts_of_replicas, "BEAT_EVERY", 0.0)
    first, second = two_hosts()
    second.beat()
    assert first.others_have_replicas()
    with monkeypatch.context() as impatient:
        impatient.setattr(hosts_of_replicas, "SILENCE", 0.3)
        wait_until_no_other_is_heard(first)
    second.beat()
    assert first.others_have_replicas()


def wait_until_no_other_is_heard(host: HostsOfReplicas) -> None:
    end = time.monotonic() + PATIENCE
    while host.others_have_replicas():
        assert time.monotonic() < end
        time.sleep(0.05)


def test_host_0_serves_the_store_until_the_others_have_left() -> None:
    first, second = two_hosts()
    left = threading.Thread(target=first.leave)
    left.start()
    left.join(0.3)
    assert left.is_alive()
    second.leave()
    left.join(PATIENCE)
    assert not left.is_alive()
