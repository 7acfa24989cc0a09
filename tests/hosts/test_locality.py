"""Ranks without a launcher that numbers them: each learns from the others which of them are on its host."""

from __future__ import annotations

import logging
import os

import pytest
import torch
import torch.distributed as dist
from torch import nn

import opensmd
import smdistributed.modelparallel.torch as smp
from opensmd.collectives import _torch_internals
from opensmd.dataparallel import distributed as v1
from tests.hosts.test_two_hosts import init_on, values
from tests.support.ports import free_port
from tests.support.ranks import run_once

SLOW = 0.001  # Gbit/s


def place_on(hosts: str) -> None:
    """Let this rank be on the host of its letter, without numbers from a launcher."""
    for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        del os.environ[name]
    os.environ["OPENSMD_HOST_ID"] = hosts[int(os.environ["RANK"])]


def run_as_pods(hosts: str, ports: list[int]) -> dict[str, tuple[int, ...]]:
    """Start as a process a pod does, of which the first is told that the master is its own host.

    Each group meets at a port of its own: who is quick must not find the store of the group before.
    """
    rank = int(os.environ["RANK"])
    place_on(hosts)
    os.environ["MASTER_ADDR"] = "localhost" if hosts[rank] == hosts[0] else "127.0.0.1"
    os.environ["MASTER_PORT"] = str(ports[0])
    smp.init({"partitions": 2, "ddp": True})
    found = {"smp": (smp.local_rank(), smp.local_size())}
    smp.shutdown()
    os.environ["MASTER_PORT"] = str(ports[1])
    v1.init_process_group()
    found["v1"] = (v1.get_local_rank(),)
    dist.destroy_process_group()
    os.environ["MASTER_PORT"] = str(ports[2])
    if rank == 3:
        os.environ["LOCAL_RANK"] = "2"
    with pytest.raises(ValueError, match=r"rank 3 says LOCAL_RANK=2, .* had 2 of them: rank 2 .*, rank 3"):
        smp.init({"partitions": 2, "ddp": True})
    return found


def test_local_ranks_come_from_where_the_ranks_met_and_not_from_the_masters_address() -> None:
    found = values(run_once(4, run_as_pods, "aabb", [free_port() for _ in range(3)], backend=None))
    assert [place["smp"] for place in found] == [(0, 2), (1, 2), (0, 2), (1, 2)]
    assert [place["v1"] for place in found] == [(0,), (1,), (0,), (1,)]


def run_planned(hosts: str, placement: str) -> tuple[list[str], list[tuple[int, int, bool]]]:
    """What rank 0 says of the placement, and what crosses between stages by everybody's plan."""
    place_on(hosts)
    os.environ["OPENSMD_NETWORK"] = f"link={SLOW}"
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("opensmd.modelparallel")
    logger.setLevel(logging.INFO)
    logger.addHandler(handler)
    smp.init({"partitions": 2, "microbatches": 2, "ddp": True, "placement_strategy": placement})
    model = smp.DistributedModel(net_with_a_narrow_place())

    @smp.step
    def train(rows: torch.Tensor) -> None:
        model.backward(model(rows).square().mean())

    train(torch.ones(4, 64))
    plan = opensmd.current_plan()
    crossings = [(crossing.source, crossing.bytes, crossing.between_hosts) for crossing in plan.crossings]
    smp.shutdown()
    return [text for text in said if text.startswith("placement_strategy")], crossings


def net_with_a_narrow_place() -> nn.Sequential:
    """Its halves take equally long, with 64 numbers a row between them; a bit before there is one number."""
    torch.manual_seed(0)
    before, after = ([nn.Linear(64, 64) for _ in range(count)] for count in (6, 10))
    return nn.Sequential(*before, nn.Linear(64, 1), nn.Linear(1, 64), *after)


@pytest.mark.parametrize(("placement", "apart"), [("cluster", False), ("spread", True)])
def test_plans_count_the_link_where_stages_are_on_two_hosts_and_the_placement_is_told(
    placement: str, apart: bool
) -> None:
    found = values(run_once(4, run_planned, "aabb", placement, backend=None))
    on_link, of_weights = (2, 0) if apart else (0, 2)
    assert found[0][0] == [
        f"placement_strategy {placement!r} on 2 hosts: between hosts go activations and their gradients of "
        f"{on_link} of 2 replicas, gradients of weights of {of_weights} of 2 averages"
    ]
    assert [told for told, _ in found[1:]] == [[], [], []]
    size = 4 * 2 * (1 if apart else 64)  # of the two rows of a microbatch
    assert [crossings for _, crossings in found] == [[(0, size, apart)]] * 4


def run_without_a_way() -> tuple[str, str]:
    """Rank 1's host has no interface of the name that it was given; then it reaches nobody."""

    def no_route(*_: object) -> None:
        raise RuntimeError("No route to host")

    rank = int(os.environ["RANK"])
    init_on("ab")
    with pytest.MonkeyPatch.context() as patch:
        if rank == 1:
            patch.setenv("GLOO_SOCKET_IFNAME", "nope0")
        with pytest.raises(dist.DistBackendError) as deaf:
            dist.new_group()
    with pytest.MonkeyPatch.context() as patch:
        if rank == 1:
            patch.setattr(_torch_internals, "gloo_group", no_route)
        with pytest.raises(dist.DistBackendError) as unconnected:
            dist.new_group()
    dist.barrier()  # the other groups go on
    return str(deaf.value), str(unconnected.value)


def test_all_ranks_hear_at_once_of_one_that_cannot_listen_or_connect() -> None:
    found = values(run_once(2, run_without_a_way, backend=None))
    for deaf, _ in found:
        assert "rank 1 cannot listen for the others of Gloo, with GLOO_SOCKET_IFNAME='nope0' there:" in deaf
    assert "rank 1 failed: No route to host (connecting Gloo). This is rank 0." in found[0][1]
    assert "No route to host (connecting Gloo; this is rank 1;" in found[1][1]
