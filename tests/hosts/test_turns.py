"""Sums in which hosts take turns, or all send to all at once, as either is faster in a network."""

from __future__ import annotations

import functools
import itertools
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
SIZES = (49_156, 65_532, 65_540, 98_300, 131_076, 200_004, 262_148, 600_004, 1_048_580, 5_000_004)


def whole(rank: int, count: int, dtype: torch.dtype) -> torch.Tensor:
    """A rank's own numbers, of which sums are exact in any order."""
    return torch.arange(count).remainder_(7).add_(rank).to(dtype)


def own(rank: int, count: int, dtype: torch.dtype) -> torch.Tensor:
    """A rank's others, of which sums are rounded."""
    return drawn(rank, count).mul(10).to(dtype)


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


def require_right(hosts: str, count: int, dtype: torch.dtype, found: list[torch.Tensor]) -> None:
    """The results of a group: the sum of whole numbers, the sum of others and the largest of these."""
    everyone = range(len(hosts))
    exact = functools.reduce(torch.add, [whole(one, count, dtype) for one in everyone])
    summed, result, largest = found
    assert torch.equal(summed, exact), (count, dtype)
    inputs = [own(one, count, dtype) for one in everyone]
    if dtype == torch.bfloat16:  # rounded on each host and once more, in the order of hosts
        expected = functools.reduce(torch.add, host_sums(hosts, inputs)).to(dtype)
        assert torch.equal(result, expected), (count, dtype)
    else:
        torch.testing.assert_close(result, sum(inputs[1:], inputs[0]), rtol=1e-5, atol=1e-4)
    assert torch.equal(largest, torch.stack(inputs).amax(0)), (count, dtype)


def check(hosts: str, group: Any, count: int, dtype: torch.dtype, checks: bool) -> int:
    """A checksum of this rank's results; a rank that ``checks`` compares them with plain torch's."""
    rank = dist.get_rank()
    mine = own(rank, count, dtype)
    found = [whole(rank, count, dtype), mine, mine.clone(), mine.clone()]
    for tensor, op in zip(found, (Op.SUM, Op.SUM, Op.MAX, Op.AVG), strict=True):
        dist.all_reduce(tensor, op, group=group)
    if checks:
        require_right(hosts, count, dtype, found[:3])
    return functools.reduce(lambda sum_, each: zlib.crc32(each.view(torch.uint8).numpy(), sum_), found, 0)


def run_both_ways(hosts: str) -> list[list[int]]:
    """Checksums of all results, each of which one rank compares with plain torch's: the others' are equal."""
    init_on(hosts)
    found = []
    turn = itertools.cycle(range(len(hosts)))
    for network in (IN_TURNS, AT_ONCE):
        os.environ["OPENSMD_NETWORK"] = network
        group = dist.new_group()
        dtypes = (torch.float32, torch.bfloat16, torch.int64)
        found.append(
            [
                check(hosts, group, size // d.itemsize, d, next(turn) == dist.get_rank())
                for size in SIZES
                for d in dtypes
            ]
        )
    return found


@pytest.mark.parametrize("hosts", ["abc", "abcd", "aabbc", "abcabcab"])
def test_sums_are_right_and_have_the_same_bits_on_all_ranks_whichever_way_they_go(hosts: str) -> None:
    found = values(run_once(len(hosts), run_both_ways, hosts, backend=None))
    for in_turns, at_once in found:
        assert in_turns == at_once == found[0][0]


def run_other_sizes(hosts: str) -> str:
    """The first rank adds up another number of elements, of which cuts go with the comparison of calls."""
    init_on(hosts)
    os.environ["OPENSMD_NETWORK"] = IN_TURNS
    group = dist.new_group()
    with pytest.raises(dist.DistBackendError) as error:
        dist.all_reduce(torch.ones(20_000 + (dist.get_rank() == 0)), group=group)
    return str(error.value)


def test_sums_of_other_sizes_along_a_ring_are_an_error_that_shows_them_on_every_rank() -> None:
    for error in values(run_once(4, run_other_sizes, "abcd", backend=None)):
        assert "count=20000" in error and "count=20001" in error, error
