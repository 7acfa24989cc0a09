"""Ranks without a launcher that numbers them: each learns from the others which of them are on its host."""

from __future__ import annotations

import os

import pytest
import torch.distributed as dist

import smdistributed.modelparallel.torch as smp
from opensmd.dataparallel import distributed as v1
from tests.hosts.test_two_hosts import values
from tests.support.ranks import free_port, run_once


def run_as_pods(hosts: str, ports: list[int]) -> dict[str, tuple[int, ...]]:
    """Start as a process a pod does, of which the first is told that the master is its own host.

    Each group meets at a port of its own: who is quick must not find the store of the group before.
    """
    rank = int(os.environ["RANK"])
    for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        del os.environ[name]
    os.environ["OPENSMD_HOST_ID"] = hosts[rank]
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
