"""Averages of whole numbers between hosts, whose sums have more bits than they."""

from __future__ import annotations

import os

import pytest
import torch
import torch.distributed as dist

from tests.hosts.test_two_hosts import init_on, values
from tests.support.ranks import run_once

Op = dist.ReduceOp


def run_averages_of_whole_numbers(hosts: str) -> None:
    init_on(hosts)
    size = len(hosts)
    for network in ("link=0.01,delay=1", "link=1,delay=100000"):  # where hosts take turns in sums, and not
        os.environ["OPENSMD_NETWORK"] = network
        group = dist.new_group()
        for count in (1_000, 10_000, 300_007):
            averaged, reduced = (torch.full((count,), 100, dtype=torch.int8) for _ in range(2))
            dist.all_reduce(averaged, Op.AVG, group=group)
            assert bool((averaged == 100).all()), count
            dist.reduce(reduced, 1, Op.AVG, group=group)
            assert dist.get_rank() != 1 or bool((reduced == 100).all()), count
        scattered = torch.empty(300_000, dtype=torch.int8)
        dist.reduce_scatter_tensor(
            scattered, torch.full((300_000 * size,), 100, dtype=torch.int8), Op.AVG, group=group
        )
        assert bool((scattered == 100).all())


@pytest.mark.parametrize("hosts", ["abc", "abcdefgh", "aabbcc"])
def test_averages_of_small_whole_numbers_do_not_overflow_on_their_way(hosts: str) -> None:
    values(run_once(len(hosts), run_averages_of_whole_numbers, hosts, backend=None))
