"""Hosts of one job learn of each other: they begin together, and none waits for one that has ended."""

from __future__ import annotations

import signal
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch.distributed as dist
from torch.distributed.elastic.rendezvous import RendezvousClosedError

from opensmd.launch.stores import other_hosts
from opensmd.launch.stores.agents_store import AgentsStore
from opensmd.launch.stores.other_hosts import OtherHosts
from tests.support.patience import PATIENCE

LONG, SHORT = timedelta(seconds=PATIENCE / 2), timedelta(milliseconds=10)


def two_hosts(signals: list[int]) -> tuple[OtherHosts, OtherHosts, dist.HashStore]:
    return OtherHosts(2, signals.append), OtherHosts(2, signals.append), dist.HashStore()


def test_all_hosts_begin_each_attempt_together(monkeypatch: pytest.MonkeyPatch) -> None:
    signals: list[int] = []
    one, other, store = two_hosts(signals)
    monkeypatch.setattr(other_hosts, "PATIENCE", 0.0)
    with ThreadPoolExecutor(1) as thread:
        for _ in range(2):
            waiting = thread.submit(one.meet, store, LONG)
            other.meet(store, LONG)
            waiting.result()
            one.look()
            assert signals == []
        with pytest.raises(dist.DistStoreError, match="only 1 of 2 hosts came to start the ranks"):
            one.meet(store, SHORT)
        while not signals:
            other.look()  # whose ranks have not noticed that the other host begins again
    assert signals[0] == signal.SIGTERM and other.ended_our_ranks


def test_nobody_waits_for_a_host_that_has_ended() -> None:
    one, other, store = two_hosts([])
    with ThreadPoolExecutor(1) as thread:
        waiting = thread.submit(one.meet, store, LONG)
        other.meet(store, LONG)
        waiting.result()
    other.say_that_this_has_ended()
    with pytest.raises(RendezvousClosedError, match="the smdrun of another host has ended: see its output"):
        one.meet(store, LONG)
    with pytest.raises(dist.DistStoreError, match="another host has ended without all"):
        AgentsStore(store, one.one_has_ended).wait(["all"], LONG)


def test_ranks_do_not_start_again_beside_hosts_whose_ranks_have_come_to_their_end() -> None:
    one, _, store = two_hosts([])
    AgentsStore(store).add("torchelastic/agent/terminal_state/num_members", 1)
    with pytest.raises(
        RendezvousClosedError, match="ranks of another host have ended, so none can start again"
    ):
        one.meet(store, LONG)


def test_what_does_not_come_in_time_is_named() -> None:
    store = AgentsStore(dist.HashStore())
    store.set("one", "1")
    store.wait(["one"], LONG)
    with pytest.raises(dist.DistStoreError, match="one, other did not come in time"):
        store.wait(["one", "other"], SHORT)
