"""A member on another host that dies: whoever needs it soon gets an error that names it and the call."""

from __future__ import annotations

import os
import re
import time
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.hosts.test_two_hosts import init_on, values
from tests.support.patience import PATIENCE
from tests.support.ranks import run_once
from tests.support.timeouts import meet_in_store


def run_messages_to_the_dead(hosts: str) -> tuple[str, str, float]:
    init_on(hosts)
    rank = dist.get_rank()
    dist.barrier()
    meet_in_store("begun")
    begin = time.monotonic()
    if rank == 3:
        time.sleep(0.3)
        os._exit(3)
    call = {0: dist.send, 1: dist.recv, 2: dist.send}[rank]
    with pytest.raises(dist.DistBackendError) as first:
        call(torch.ones(1_000_000), 3)
    seconds = time.monotonic() - begin
    with pytest.raises(dist.DistBackendError) as second:
        dist.barrier()
    return str(first.value), str(second.value), seconds


def test_messages_to_and_from_a_dead_rank_fail_at_once_and_name_it_and_the_call() -> None:
    outcomes = run_once(4, run_messages_to_the_dead, "aabb", backend=None)
    assert outcomes[3].kind == "died"
    calls = ["send to rank 3", "receive from rank 3", "send to rank 3"]
    for rank, (first, second, seconds) in enumerate(values(outcomes[:3])):
        assert f"rank {rank} on " in first and calls[rank] in first, first
        for text in (first, second):
            assert re.search(r"rank 3 on \S+ has died", text), text
        assert seconds < PATIENCE / 2  # not at the timeout


def run_new_group_without_one(hosts: str) -> str:
    init_on(hosts)
    meet_in_store("all are here")
    if dist.get_rank() == 3:
        os._exit(3)
    with pytest.raises(dist.DistBackendError) as told:
        dist.new_group(timeout=timedelta(seconds=10 * PATIENCE))
    return str(told.value)


def test_all_hosts_hear_of_a_member_that_dies_before_it_joins_a_new_group() -> None:
    outcomes = run_once(4, run_new_group_without_one, "aabb", backend=None)
    assert outcomes[3].kind == "died"
    for told in values(outcomes[:3]):
        assert "rank 3 will not join (its process has died)" in told, told


def run_late_receiver(hosts: str) -> str:
    init_on(hosts)
    group: Any = dist.new_group()
    dist.barrier(group)
    meet_in_store("connected")
    group.set_timeout(timedelta(seconds=1))
    store = dist.distributed_c10d._get_default_store()
    if dist.get_rank() == 1:
        store.wait(["given up"], timedelta(seconds=PATIENCE))
        with pytest.raises(dist.DistBackendError) as error:
            dist.all_reduce(torch.ones(3), group=group)
    else:
        with pytest.raises(dist.DistBackendError) as error:
            dist.recv(torch.ones(3), 1, group=group)
        store.set("given up", "")
    return str(error.value)


def test_a_rank_that_loses_another_is_told_why_that_one_gave_up() -> None:
    """A receive that times out closes Gloo's connections: that is no death."""
    for text in values(run_once(2, run_late_receiver, "ab", backend=None)):
        assert re.search(r"rank 0 on \S+ in a receive from rank 1 on \S+ \(12 bytes", text), text
        assert "Timed out" in text and "has died" not in text, text


def run_without_the_first_rank(hosts: str) -> str:
    init_on(hosts)
    dist.barrier()
    if dist.get_rank() == 0:
        os._exit(3)
    with pytest.raises(dist.DistBackendError) as error:
        while True:
            dist.all_reduce(torch.ones(100_000))
    return str(error.value)


@pytest.mark.parametrize("hosts", ["abc", "abbcc"])
def test_the_first_rank_alone_is_named_where_it_dies_with_the_store(hosts: str) -> None:
    """Survivors then cannot say why they close their connections: that is no death."""
    first, *others = run_once(len(hosts), run_without_the_first_rank, hosts, backend=None)
    assert first.kind == "died"
    for text in values(others):
        assert re.search(r"rank 0 on \S+ has died", text) and "have died" not in text, text
