"""Sums in which hosts take turns, or all send to all at once, as either is faster in a network."""

from __future__ import annotations

import functools
import os
import zlib
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.hosts.test_two_hosts import drawn, init_on, values
from tests.support.ranks import run_once

Op = dist.ReduceOp
IN_TURNS, AT_ONCE = "link=0.01,delay=1", "link=1,delay=100000"  # what is faster there
# Bytes: too few for turns, about as many as are enough on these hosts, of one part, of two, and of several.
SIZES = (65_532, 65_540, 98_300, 131_076, 200_004, 262_148, 600_004, 4_194_308, 5_000_004)


def whole(rank: int, count: int, dtype: torch.dtype) -> torch.Tensor:
    """A rank's own numbers, of which sums are exact in any order."""
    return torch.arange(count).remainder_(7).add_(rank).to(dtype)


def host_sums(hosts: str, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
    """Rounded as each host does."""
    return [
        functools.reduce(
            torch.add, [one.float() for one, at in zip(inputs, hosts, strict=True) if at == host]
        )
        .to(inputs[0].dtype)
        .float()
        for host in sorted(set(hosts))
    ]


def check(hosts: str, group: Any, count: int, dtype: torch.dtype) -> int:
    """A checksum of this rank's results."""
    rank, everyone = dist.get_rank(), range(len(hosts))
    summed = whole(rank, count, dtype)
    dist.all_reduce(summed, group=group)
    exact = functools.reduce(torch.add, [whole(one, count, dtype) for one in everyone])
    assert torch.equal(summed, exact), (count, dtype)
    inputs = [drawn(one, count).mul(10).to(dtype) for one in everyone]
    result = inputs[rank].clone()
    dist.all_reduce(result, group=group)
    if dtype == torch.bfloat16:  # rounded on each host and once more, in the order of hosts
        expected = functools.reduce(torch.add, host_sums(hosts, inputs)).to(dtype)
        assert torch.equal(result, expected), (count, dtype)
    else:
        torch.testing.assert_close(result, sum(inputs[1:], inputs[0]), rtol=1e-5, atol=1e-4)
    largest, averaged = inputs[rank].clone(), inputs[rank].clone()
    dist.all_reduce(largest, Op.MAX, group=group)
    assert torch.equal(largest, torch.stack(inputs).amax(0)), (count, dtype)
    dist.all_reduce(averaged, Op.AVG, group=group)
    found = zlib.crc32(result.view(torch.uint8).numpy())
    return zlib.crc32(averaged.view(torch.uint8).numpy(), found)


def run_both_ways(hosts: str) -> list[list[int]]:
    init_on(hosts)
    found = []
    for network in (IN_TURNS, AT_ONCE):
        os.environ["OPENSMD_NETWORK"] = network
        group = dist.new_group()
        dtypes = (torch.float32, torch.bfloat16, torch.int64)
        found.append([check(hosts, group, size // d.itemsize, d) for size in SIZES for d in dtypes])
    return found


@pytest.mark.parametrize("hosts", ["abc", "abcd", "aabbc", "abcabcab"])
def test_sums_are_right_and_have_the_same_bits_on_all_ranks_whichever_way_they_go(hosts: str) -> None:
    found = values(run_once(len(hosts), run_both_ways, hosts, backend=None))
    for in_turns, at_once in found:
        assert in_turns == at_once == found[0][0]
