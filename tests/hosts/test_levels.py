"""Collectives between hosts, too large for the comparison of calls: uneven hosts, ranks in any order.

Hosts are made of this one by giving ranks different identities, as in ``test_two_hosts``.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable

import pytest
import torch
import torch.distributed as dist

from tests.hosts.test_two_hosts import drawn, init_on, values
from tests.support.ranks import run_once

COUNT = 300_007  # elements of a piece; 1.2 MB, and more than goes with the comparison of calls


@functools.cache
def remainders(count: int) -> torch.Tensor:
    """Of five."""
    return torch.arange(count, dtype=torch.int32).remainder_(5)


def numbers(rank: int, count: int = COUNT, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """A rank's own, of which sums are exact in every type."""
    return remainders(count).add(rank).to(dtype)


def summed_numbers(ranks: Iterable[int], part: torch.Tensor) -> torch.Tensor:
    """The sum of the numbers of these ranks at ``part`` of the remainders."""
    added = list(ranks)
    return part.mul(len(added)).add(sum(added))


def uneven(rank: int) -> int:
    """How many elements are of a rank; one has none."""
    return 0 if rank == 1 else COUNT // (rank + 1)


def run_sums(group: dist.ProcessGroup, rank: int, size: int) -> None:
    everyone = range(size)
    exact = summed_numbers(everyone, remainders(COUNT))
    for dtype in (torch.float32, torch.bfloat16, torch.int32):
        total = exact.to(dtype)
        for root in (0, size - 1):
            reduced = numbers(rank, dtype=dtype)
            dist.reduce(reduced, dist.get_global_rank(group, root), group=group)
            assert rank != root or torch.equal(reduced, total)
        summed = numbers(rank, dtype=dtype)
        dist.all_reduce(summed, group=group)
        assert torch.equal(summed, total)
    mean = exact / size
    for dtype in (torch.float32, torch.float16):
        averaged = numbers(rank, dtype=dtype)
        dist.reduce(averaged, dist.get_global_rank(group, 1), dist.ReduceOp.AVG, group=group)
        assert rank != 1 or torch.allclose(averaged.float(), mean, rtol=2e-3)
    parts = [numbers(rank + r, uneven(r)) for r in everyone]
    mine = torch.empty(uneven(rank))
    dist.reduce_scatter(mine, parts, group=group)
    expected = summed_numbers([rank + r for r in everyone], remainders(uneven(rank)))
    assert torch.equal(mine, expected.float())
    whole = numbers(rank, COUNT * size, torch.int8)  # whose averages go in one step
    third = torch.empty(COUNT, dtype=torch.int8)
    dist.reduce_scatter_tensor(third, whole, dist.ReduceOp.AVG, group=group)
    every = summed_numbers(everyone, remainders(COUNT * size).chunk(size)[rank])
    assert torch.equal(third, every.div(size, rounding_mode="trunc").to(torch.int8))


def run_moves(group: dist.ProcessGroup, rank: int, size: int) -> None:
    everyone = range(size)
    for root in (0, size - 1):
        source = dist.get_global_rank(group, root)
        tensor = numbers(rank)
        dist.broadcast(tensor, source, group=group)
        assert torch.equal(tensor, numbers(root))
        into = [torch.empty(COUNT) for _ in everyone] if rank == root else None
        dist.gather(numbers(rank), into, source, group=group)
        assert into is None or all(torch.equal(into[r], numbers(r)) for r in everyone)
        given = [numbers(10 + r) for r in everyone] if rank == root else None
        dist.scatter(tensor, given, source, group=group)
        assert torch.equal(tensor, numbers(10 + rank))
    gathered = [torch.empty(uneven(r)) for r in everyone]
    dist.all_gather(gathered, numbers(rank, uneven(rank)), group=group)
    assert all(torch.equal(gathered[r], numbers(r, uneven(r))) for r in everyone)
    whole = torch.empty(COUNT * size)
    whole.chunk(size)[rank].copy_(numbers(rank))
    dist.all_gather_into_tensor(whole, whole.chunk(size)[rank], group=group)  # in place
    assert torch.equal(whole, torch.cat([numbers(r) for r in everyone]))


def run_exchanges(group: dist.ProcessGroup, rank: int, size: int) -> None:
    everyone = range(size)
    for count in (1, 5_003, 9_001, COUNT):
        received = [torch.empty(count) for _ in everyone]
        dist.all_to_all(received, [numbers(10 * rank + r, count) for r in everyone], group=group)
        assert all(torch.equal(received[r], numbers(10 * r + rank, count)) for r in everyone)
    # every pair has its own count, though those of rank 0 are all one
    counts = [[7 if 0 in (a, b) else (a * size + b) * 20_000 for b in everyone] for a in everyone]
    received = [torch.empty(counts[r][rank]) for r in everyone]
    dist.all_to_all(received, [numbers(10 * rank + r, counts[rank][r]) for r in everyone], group=group)
    assert all(torch.equal(received[r], numbers(10 * r + rank, counts[r][rank])) for r in everyone)


def run_large(hosts: str) -> None:
    init_on(hosts)
    subset = list(range(len(hosts)))[::-1][:-1]  # in another order, and without rank 0
    for ranks in (list(range(len(hosts))), subset):
        group = dist.new_group(ranks)
        if dist.get_rank() in ranks:
            place = (group, dist.get_rank(group), len(ranks))
            run_sums(*place)
            run_moves(*place)
            run_exchanges(*place)


@pytest.mark.parametrize("hosts", ["aabb", "abbab", "aaab", "abcd", "abbca"])
def test_large_collectives_give_what_they_must_however_ranks_are_placed(hosts: str) -> None:
    values(run_once(len(hosts), run_large, hosts, backend=None))


def run_two_hosts_of_two() -> None:
    init_on("aabb")
    for count in (9_001, 100_003, 1_700_003):  # of one part and of several
        first, second, third, last = (drawn(rank, count) for rank in range(4))
        summed = drawn(dist.get_rank(), count)
        dist.all_reduce(summed)
        assert torch.equal(summed, (first + second) + (third + last))


def test_sums_of_two_hosts_have_the_bits_of_their_hosts_sums_added_up() -> None:
    values(run_once(4, run_two_hosts_of_two, backend=None))


def run_scattered_along_a_ring(hosts: str) -> None:
    init_on(hosts)
    rank, size = dist.get_rank(), dist.get_world_size()
    names = sorted(set(hosts))
    mine = names.index(hosts[rank])
    behind = [names[(mine + step) % len(names)] for step in range(1, len(names) + 1)]
    for least in (9_001, 40_003, 560_007):  # the first straight to whom they are for, the others along a ring
        counts = [least + 1_000 * of for of in range(size)]
        given = [drawn(size * rank + to, counts[to]) for to in range(size)]
        mine = [drawn(size * of + rank, counts[rank]) for of in range(size)]
        summed, averaged = torch.empty(counts[rank]), torch.empty(counts[rank])
        dist.reduce_scatter(summed, given)
        dist.reduce_scatter(averaged, given, dist.ReduceOp.AVG)
        of_hosts = {
            name: functools.reduce(torch.add, [mine[of] for of in range(size) if hosts[of] == name])
            for name in names
        }
        order = names if least == 9_001 else behind
        assert torch.equal(summed, functools.reduce(torch.add, [of_hosts[name] for name in order]))
        torch.testing.assert_close(averaged, summed / size)


@pytest.mark.parametrize("hosts", ["abc", "aabbcc", "abcdabcd"])
def test_scattered_sums_of_several_hosts_have_the_bits_of_one_order_of_them(hosts: str) -> None:
    values(run_once(len(hosts), run_scattered_along_a_ring, hosts, backend=None))
