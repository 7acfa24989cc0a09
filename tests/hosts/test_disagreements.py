"""Ranks of different hosts that make different calls: every rank gets one error that shows all of them.

It comes with the call or, on a host that only sends there, with the next one.

Hosts are made of this one by giving ranks different identities, as in ``test_two_hosts``.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.hosts.test_two_hosts import init_on, values
from tests.support.patience import PATIENCE
from tests.support.ranks import run_once
from tests.support.timeouts import meet_in_store

Op = dist.ReduceOp
Calls = Callable[[Any], Any]
LARGE = 300_000  # more elements than travel with a comparison


def reduced(count: int, op: Any = Op.SUM, dtype: torch.dtype = torch.float32) -> Calls:
    return lambda group: dist.all_reduce(torch.ones(count, dtype=dtype), op, group=group)


def broadcast(count: int, source: int = 0) -> Calls:
    return lambda group: dist.broadcast(torch.ones(count), source, group=group)


def gathered(count: int) -> Calls:
    def call(group: Any) -> None:
        size = dist.get_world_size(group)
        dist.all_gather([torch.empty(count) for _ in range(size)], torch.ones(count), group=group)

    return call


def scattered_sums(count: int, op: Any = Op.SUM) -> Calls:
    def call(group: Any) -> None:
        whole = torch.ones(count * dist.get_world_size(group))
        dist.reduce_scatter_tensor(torch.empty(count), whole, op, group=group)

    return call


def exchanged(rows: int) -> Calls:
    def call(group: Any) -> None:
        size = dist.get_world_size(group)
        dist.all_to_all_single(torch.empty(rows * size), torch.ones(rows * size), group=group)

    return call


def collected(count: int, root: int = 0) -> Calls:
    def call(group: Any) -> None:
        here = dist.get_rank(group) == root
        into = [torch.empty(count) for _ in range(dist.get_world_size(group))] if here else None
        dist.gather(torch.ones(count), into, dst=root, group=group)

    return call


# What the first host calls, what all others call, and words of each that the error must hold.
CASES: dict[str, tuple[Calls, Calls, str, str]] = {
    "reductions": (reduced(4, Op.MIN), reduced(4, Op.MAX), "all_reduce(min, ", "all_reduce(max, "),
    "averages": (reduced(4), reduced(4, Op.AVG), "all_reduce(sum, ", "all_reduce(avg, "),
    "dtypes": (reduced(4), reduced(4, dtype=torch.int32), "float32", "int32"),
    "small sizes": (reduced(4), reduced(5), "count=4", "count=5"),
    "large sizes": (reduced(LARGE), reduced(LARGE + 1), f"count={LARGE}", f"count={LARGE + 1}"),
    "a small and a large size": (reduced(3), reduced(LARGE), "count=3", f"count={LARGE}"),
    "large reductions": (reduced(LARGE, Op.MIN), reduced(LARGE, Op.PRODUCT), "min", "product"),
    "narrow floats": (
        reduced(40_000, dtype=torch.bfloat16),
        reduced(40_000, dtype=torch.float16),
        "bfloat16",
        "float16",
    ),
    "operations": (reduced(4), broadcast(4), "all_reduce(", "broadcast("),
    "an operation and a barrier": (
        lambda group: dist.barrier(group),
        reduced(LARGE),
        "barrier()",
        "all_reduce(",
    ),
    "sources": (broadcast(4, 0), broadcast(4, 1), "root=0", "root=1"),
    "sizes of broadcasts": (broadcast(4), broadcast(4000), "count=4", "count=4000"),
    "sizes of all_gather": (gathered(3), gathered(7), "all_gather(", "all_gather("),
    "sizes of reduce_scatter": (scattered_sums(3), scattered_sums(9), "reduce_scatter(", "count="),
    "reductions of reduce_scatter": (scattered_sums(3), scattered_sums(3, Op.MAX), "(sum, ", "(max, "),
    "sizes of all_to_all": (exchanged(3), exchanged(4), "sends 3 elements", "which expects 4"),
    "sizes of gather": (collected(3), collected(5), "count=3", "count=5"),
    "large gathers": (collected(LARGE), collected(LARGE + 1), f"count={LARGE}", f"count={LARGE + 1}"),
    "roots of gather": (collected(3), collected(3, 1), "root=0", "root=1"),
    "gather and broadcast": (collected(3), broadcast(3), "gather(", "broadcast("),
    "a large gather and a small broadcast": (collected(LARGE), broadcast(3), "gather(", "broadcast("),
    "broadcasts of both": (broadcast(4), broadcast(4, 1), "root=0", "root=1"),
}


def run_case(first: Calls, other: Calls, firsts: bool) -> tuple[str, float]:
    """The error of a group of its own, and the seconds until it came."""
    group = dist.new_group()
    dist.all_reduce(torch.ones(2), group=group)
    begin = time.monotonic()
    with pytest.raises(dist.DistBackendError) as error:
        (first if firsts else other)(group)
        dist.barrier(group)  # who has only sent something hears of it now
    seconds = time.monotonic() - begin
    with pytest.raises(dist.DistBackendError):
        dist.barrier(group)
    return str(error.value), seconds


def run_late_host(late: bool) -> str:
    group: Any = dist.new_group()
    dist.barrier(group)
    meet_in_store("connected")
    group.set_timeout(timedelta(seconds=1))
    store = dist.distributed_c10d._get_default_store()
    if late:
        store.wait(["given up"], timedelta(seconds=PATIENCE))
        time.sleep(0.5)
    with pytest.raises(dist.DistBackendError) as error:
        dist.all_reduce(torch.ones(4), group=group)
    store.set("given up", "")
    return str(error.value)


def run_disagreements(hosts: str) -> tuple[dict[str, tuple[str, float]], tuple[str, float], str]:
    init_on(hosts)
    rank = dist.get_rank()
    between = {
        name: run_case(first, other, hosts[rank] == "a") for name, (first, other, _, _) in CASES.items()
    }
    within = run_case(reduced(4), broadcast(4), rank == 1)
    timeout = run_late_host(hosts[rank] == "b")
    reduced(4)(None)  # other groups go on
    return between, within, timeout


@pytest.mark.parametrize("hosts", ["ab", "abbc"])
def test_calls_that_differ_between_ranks_are_an_error_that_shows_them_on_every_rank(hosts: str) -> None:
    ranks = values(run_once(len(hosts), run_disagreements, hosts, backend=None))
    everybody = [f"rank {rank} on " for rank in range(len(hosts))]
    for rank, (between, within, timeout) in enumerate(ranks):
        for name, (_, _, one, another) in CASES.items():
            text, seconds = between[name]
            assert seconds < PATIENCE / 2, (name, text)  # long before the timeout
            assert f"rank {rank} on " in text, (name, text)
            assert one in text and another in text, (name, text)
            if "all_to_all" not in name:
                assert text.count(" called ") == 2, (name, text)
                assert all(other in text for other in everybody), (name, text)
        text, seconds = within
        assert seconds < PATIENCE / 2 and text.count(" called ") == 2, text
        assert "rank 1 on " in text and "all_reduce(sum" in text and "broadcast(" in text, text
        if hosts[rank] != "b":
            assert "not arrived: rank 1 on " in timeout, timeout
