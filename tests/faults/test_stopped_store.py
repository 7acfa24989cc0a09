"""The process that serves the store is stopped: making a group ends at its timeout all the same."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist

from opensmd.collectives import _torch_internals, backend
from opensmd.collectives import exchange as exchange_module
from opensmd.collectives.exchange import Exchange
from tests.faults.test_killed_saves import stop
from tests.support.jobs import both
from tests.support.patience import PATIENCE
from tests.support.ranks import Outcome, run_once

TIMEOUT = 1.0


def failure(make: Callable[[], Any]) -> str:
    """What a group's making is refused with; torch alone would wait for ever."""
    with pytest.raises(dist.DistBackendError) as raised:
        make()
    return str(raised.value)


def pair() -> Any:
    return dist.new_group([1, 2], timeout=timedelta(seconds=TIMEOUT))


def run_with_stopped_server() -> dict[str, str]:
    """Rank 0, which serves the store, stops; but first rank 2 is late for a group."""
    pids: list[int] = [0] * 3
    dist.all_gather_object(pids, os.getpid())
    rank, store = dist.get_rank(), dist.distributed_c10d._get_default_store()
    exchange_module.GRACE = PATIENCE  # so far the store works, however busy the machine is
    if rank == 0:
        time.sleep(PATIENCE)
    if rank == 2:
        store.wait(["rank 1 has given up"], timedelta(seconds=PATIENCE))
        os.environ["OPENSMD_NATIVE"] = "0"  # torch's Gloo, which it goes on to, would name a key of its own
    told = {"late": failure(pair)}
    store.set("rank 1 has given up", "")
    os.environ.pop("OPENSMD_NATIVE", None)
    together = dist.new_group([1, 2])
    store = dist.PrefixStore("lanes", store)
    exchange = Exchange(store, rank - 1, (1, 2), timeout=timedelta(seconds=TIMEOUT), group="lanes")
    dist.barrier(together)
    exchange_module.GRACE = TIMEOUT
    if rank == 2:
        stop([pids[0]])
    dist.barrier(together)
    options = _torch_internals.gloo_options(timeout=timedelta(seconds=TIMEOUT), one_network=True)
    connect = partial(_torch_internals.gloo_group, store, rank - 1, 2, options)
    told["Gloo"], told["new_group"] = both(
        lambda: failure(lambda: exchange.within("connecting Gloo", connect)), lambda: failure(pair)
    )
    dist.all_reduce(torch.ones(1), group=together)  # a group that is made needs no store
    dist.destroy_process_group()
    told["init_process_group"] = failure(
        lambda: dist.init_process_group(
            backend.NAME, rank=rank, world_size=3, timeout=timedelta(seconds=TIMEOUT)
        )
    )
    return told


@pytest.fixture(scope="module")
def outcomes() -> list[Outcome]:
    ended = run_once(3, run_with_stopped_server, silent=[0])[1:]
    for outcome in ended:
        assert outcome.kind == "value", outcome.text
    return ended


@pytest.mark.parametrize("making", ["new_group", "Gloo", "init_process_group"])
def test_a_stopped_store_ends_the_making_of_a_group_at_its_timeout(
    making: str, outcomes: list[Outcome]
) -> None:
    for outcome in outcomes:
        text = outcome.value[making]
        assert f"did not answer within {TIMEOUT:g} s" in text
        assert "is stopped" in text and "127.0.0.1:" in text


def test_a_rank_that_does_not_join_a_subgroup_is_named_as_in_the_whole_job(outcomes: list[Outcome]) -> None:
    early, late = (outcome.value["late"] for outcome in outcomes)
    assert "of ranks 1, 2: rank 2 did not join" in early and "this is rank 1" in early
    assert "rank 1 did not join" in late and "this is rank 2" in late


def run_without_server() -> str:
    rank = int(os.environ["RANK"])
    backend.register()
    with pytest.raises(dist.DistNetworkError) as raised:
        dist.init_process_group(backend.NAME, rank=rank + 1, world_size=2, timeout=timedelta(seconds=TIMEOUT))
    return str(raised.value)


def test_a_missing_store_is_told_with_its_address_in_time() -> None:
    (outcome,) = run_once(1, run_without_server, backend=None)
    assert outcome.kind == "value", outcome.text
    assert "nothing listened there" in outcome.value and "MASTER_PORT" in outcome.value


def run_where_the_port_is_taken() -> str:
    backend.register()
    with socket.socket() as other_job:
        other_job.bind(("127.0.0.1", 0))
        other_job.listen()
        address = f"tcp://127.0.0.1:{other_job.getsockname()[1]}"
        with pytest.raises(dist.DistNetworkError) as raised:
            dist.init_process_group(backend.NAME, init_method=address, rank=0, world_size=2)
    return str(raised.value)


def test_a_port_that_another_job_has_is_told_as_such() -> None:
    (outcome,) = run_once(1, run_where_the_port_is_taken, backend=None)
    assert outcome.kind == "value", outcome.text
    assert "rank 0 serves the store" in outcome.value and "another process has that port" in outcome.value
    assert "MASTER_PORT" in outcome.value
