"""all_reduce over a tree of hosts, which hundreds of hosts take, or four if a given network makes them."""

from __future__ import annotations

import contextlib
import io
import os
import re
from typing import Any

import torch
import torch.distributed as dist

from tests.hosts.test_two_hosts import init_on, values
from tests.support.ranks import run_once

Op = dist.ReduceOp
NETWORK = "link=800,delay=0"  # Gbit/s: so fast that messages cost more than bytes
MIB = 3  # of each tensor: enough for the tree there


def random_of(dtype: torch.dtype, whole: bool) -> torch.Tensor:
    """Own numbers of each rank; sums of ``whole`` ones are exact in any order."""
    chance = torch.Generator().manual_seed(dist.get_rank())
    count = (MIB << 20) // dtype.itemsize
    if whole or not dtype.is_floating_point:
        return torch.randint(-9, 9, (count,), generator=chance).to(dtype)
    return torch.randn(count, generator=chance).to(dtype)


def summed(numbers: torch.Tensor, op: Any, group: Any = None) -> torch.Tensor:
    result = numbers.clone()
    dist.all_reduce(result, op, group=group)
    return result


def run_over_a_tree(hosts: str) -> str:
    os.environ.update(OPENSMD_NETWORK=NETWORK, OPENSMD_NETWORK_REPORT="1")
    with contextlib.redirect_stderr(io.StringIO()) as said:
        init_on(hosts)
    gloo = dist.new_group(backend="gloo")
    for dtype, op in [
        (torch.float32, Op.SUM),
        (torch.float32, Op.AVG),
        (torch.float64, Op.MAX),
        (torch.bfloat16, Op.SUM),
        (torch.int64, Op.SUM),
    ]:
        exact = random_of(dtype, whole=True)
        of_gloo = summed(exact, Op.SUM if op is Op.AVG else op, gloo)
        assert torch.equal(summed(exact, op), of_gloo / len(hosts) if op is Op.AVG else of_gloo), (dtype, op)
        result = summed(random_of(dtype, whole=False), op)
        bits = [torch.empty_like(result) for _ in hosts]
        dist.all_gather(bits, result, group=gloo)
        assert all(torch.equal(other, result) for other in bits), (dtype, op)
    return said.getvalue()


def test_the_tree_gives_gloos_sums_and_the_same_bits_on_all_ranks() -> None:
    said = values(run_once(4, run_over_a_tree, "abcd", backend=None))[0]
    chosen = re.search(r"all_reduce takes a tree of hosts from ([\d.]+) MiB on", said)
    assert chosen and float(chosen[1]) <= MIB, said
