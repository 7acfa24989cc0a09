"""all_reduce over a tree of hosts, which hundreds of hosts take, or four if a given network makes them."""

from __future__ import annotations

import contextlib
import io
import os
import re
import zlib
from typing import Any

import pytest
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
    if os.environ["RANK"] == "0":  # whose value counts
        os.environ.update(OPENSMD_NETWORK=NETWORK, OPENSMD_NETWORK_REPORT="1")
    with contextlib.redirect_stderr(io.StringIO()) as said:
        init_on(hosts)
    gloo = dist.new_group(backend="gloo")
    for dtype, op in [
        (torch.float32, Op.SUM),
        (torch.float32, Op.AVG),
        (torch.float64, Op.MAX),
        (torch.bfloat16, Op.SUM),
        (torch.float16, Op.AVG),
        (torch.int64, Op.SUM),
    ]:
        exact = random_of(dtype, whole=True)
        of_gloo = summed(exact, Op.SUM if op is Op.AVG else op, gloo)
        assert torch.equal(summed(exact, op), of_gloo / len(hosts) if op is Op.AVG else of_gloo), (dtype, op)
        result = summed(random_of(dtype, whole=False), op)
        bits = [torch.empty_like(result) for _ in hosts]
        dist.all_gather(bits, result, group=gloo)
        assert all(torch.equal(other, result) for other in bits), (dtype, op)
        if dtype in (torch.bfloat16, torch.float16):
            check_roundings(result, op, dtype, gloo)
    return said.getvalue()


def check_roundings(result: torch.Tensor, op: Any, dtype: torch.dtype, gloo: Any) -> None:
    """One on each host and one of the sum, however many hosts there are."""
    own = random_of(dtype, whole=False).double()
    size = dist.get_world_size() if op is Op.AVG else 1
    exact = summed(own, Op.SUM, gloo) / size
    sizes = summed(own.abs(), Op.SUM, gloo) / size
    allowed = torch.finfo(dtype).eps / 2 * (sizes + exact.abs()) * 1.01 + torch.finfo(dtype).tiny
    assert bool(((result.double() - exact).abs() <= allowed).all()), (dtype, op)


def run_with_networks(hosts: str) -> list[str]:
    """Checksums of results, by what is known of the network."""
    found = []
    if os.environ["RANK"] != "0":  # which measures all the same
        os.environ["OPENSMD_NETWORK"] = NETWORK
    init_on(hosts)
    for network in ("link=0.01,delay=1", "link=400,delay=0", "link=1,delay=100000"):
        os.environ["OPENSMD_NETWORK"] = network
        found.append(checksums(dist.new_group(), hosts))
    return found


def checksums(group: Any, hosts: str) -> str:
    found = 0
    for count in (5, 3000, 5000, 9001, 14000, 17000):  # 20 B to 68 KiB
        for dtype in (torch.float32, torch.bfloat16):
            numbers = torch.randn(
                count * len(hosts), generator=torch.Generator().manual_seed(dist.get_rank())
            )
            numbers = numbers.to(dtype)
            summed_up, reduced, scattered = (
                numbers[:count].clone(),
                numbers[:count].clone(),
                numbers[:count].clone(),
            )
            dist.all_reduce(summed_up, group=group)
            dist.reduce(reduced, 1, group=group)
            dist.reduce_scatter_tensor(scattered, numbers, group=group)
            results = [summed_up, scattered, *([reduced] if dist.get_rank() == 1 else [])]
            for result in results:
                found = zlib.crc32(result.view(torch.uint8).numpy(), found)
    return f"{found:08x}"


@pytest.mark.parametrize("hosts", ["aabb", "abca", "abcd"])
def test_results_have_the_same_bits_however_fast_the_network_was_found(hosts: str) -> None:
    for found in values(run_once(4, run_with_networks, hosts, backend=None)):
        assert len(set(found)) == 1, found


def test_the_tree_gives_gloos_sums_and_the_same_bits_on_all_ranks() -> None:
    said = values(run_once(4, run_over_a_tree, "abcd", backend=None))[0]
    chosen = re.search(r"all_reduce takes a tree of hosts from ([\d.]+) MiB on", said)
    assert chosen and float(chosen[1]) <= MIB, said
