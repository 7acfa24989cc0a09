"""Groups whose ranks do not share memory: everything works, through Gloo.

Two "hosts" are made of this one by giving ranks different identities.
"""

from __future__ import annotations

import functools
import os
import re
import time
import zlib
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

from opensmd.collectives import _torch_internals
from opensmd.collectives.mailbox import has_mailbox
from tests.ranks.collectives import test_forms, test_groups, test_messages
from tests.ranks.collectives.test_table import (
    Failures,
    Op,
    check_moves,
    check_reductions,
    check_rooted_moves,
    places,
)
from tests.ranks.data_parallel import test_ddp
from tests.support.ddp_training import compare
from tests.support.patience import PATIENCE
from tests.support.ranks import Outcome, run_once
from tests.support.timeouts import meet_in_store


def init_on(hosts: str) -> None:
    """Join the world as a process of the host that this rank's letter names."""
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    os.environ["OPENSMD_HOST_ID"] = hosts[rank]
    import smdistributed.dataparallel.torch.torch_smddp  # noqa: F401

    dist.init_process_group("smddp", rank=rank, world_size=size, timeout=timedelta(seconds=PATIENCE))
    assert _torch_internals.cpu_backend(None).spans_hosts()
    assert not has_mailbox()


def run_cases(hosts: str) -> list[str]:
    init_on(hosts)
    failures = Failures()
    for place in places():
        for shape in [(), (0,), (7,), (3, 5), (70_001,)]:
            for dtype in (torch.float32, torch.bfloat16, torch.int16, torch.bool, torch.float8_e4m3fn):
                check_moves(failures, place, dtype, shape)
                check_rooted_moves(failures, place, dtype, shape)
                check_reductions(failures, place, Op.SUM, dtype, shape)
            check_reductions(failures, place, Op.AVG, torch.int32, shape)
            check_reductions(failures, place, Op.MAX, torch.float64, shape)
            check_reductions(failures, place, Op.BXOR, torch.uint8, shape)
    return failures.texts


def run_sums_in_parts(hosts: str) -> list[int]:
    """What several ranks of a host add up in shared memory first; checksums of the results."""
    init_on(hosts)
    rank, size = dist.get_rank(), dist.get_world_size()
    checksums = []
    for count in (1, 8191, 1_100_003):  # the last is of several parts, in any type
        inputs = {of: drawn(of, count) for of in (range(size) if rank == 0 else [rank])}
        for dtype in (torch.float32, torch.float64, torch.complex64, torch.int64, torch.int8, torch.bfloat16):
            mine = (10 * inputs[rank]).to(dtype)
            summed, averaged = mine.clone(), mine
            dist.all_reduce(summed)
            dist.all_reduce(averaged, Op.AVG)
            checksums += [zlib.crc32(tensor.view(torch.uint8).numpy()) for tensor in (summed, averaged)]
            if rank == 0:  # the others' bits are compared with these
                check_sums(summed, averaged, [(10 * one).to(dtype) for one in inputs.values()])
        largest, scaled = inputs[rank].clone(), inputs[rank].clone()
        dist.all_reduce(largest, Op.MAX)
        dist.all_reduce(scaled, dist._make_nccl_premul_sum(rank + 0.5))
        checksums += [zlib.crc32(tensor.view(torch.uint8).numpy()) for tensor in (largest, scaled)]
        if rank == 0:
            assert torch.equal(largest, torch.stack([*inputs.values()]).amax(0))
            expected = sum((of + 0.5) * one for of, one in inputs.items())
            torch.testing.assert_close(scaled, expected, rtol=1e-4, atol=1e-4)
    return checksums


def drawn(rank: int, count: int) -> torch.Tensor:
    return torch.randn(count, generator=torch.Generator().manual_seed(rank))


def check_sums(summed: torch.Tensor, averaged: torch.Tensor, inputs: list[torch.Tensor]) -> None:
    """Compare sum and average with those of wider numbers."""
    widest = torch.complex128 if summed.is_complex() else torch.float64
    total = functools.reduce(torch.Tensor.add_, inputs[1:], inputs[0].to(widest))
    for found, parts in ((summed, 1), (averaged, len(inputs))):
        expected = total / parts
        if found.dtype == torch.bfloat16:  # rounded on each host and once more
            allowed = 2**-7 * sum(one.float().abs() for one in inputs) / parts
            assert bool(((found - expected).abs() <= allowed).all())
            continue
        if not found.is_floating_point() and not found.is_complex():
            expected = expected.trunc()
        torch.testing.assert_close(found, expected.to(found.dtype), rtol=1e-5, atol=1e-4)


def run_forms(hosts: str) -> None:
    init_on(hosts)
    for case in test_forms.CASES:
        if case is not test_forms.run_allocated:
            case()
    messages = test_messages
    needing_shared_memory = (
        messages.run_mailbox,
        messages.run_mailbox_that_goes,
        messages.run_everybody_sends_first,
        messages.run_wrong_dtypes,  # which the wire does not tell
        messages.run_dropped_handles,
    )
    for case in messages.CASES:
        if case not in needing_shared_memory:
            case()
    with pytest.raises(ValueError, match="cannot send to itself"):
        dist.isend(torch.ones(1), dist.get_rank())
    test_groups.run_groups_beside_groups()
    backend = _torch_internals.cpu_backend(None)
    assert backend.supports_tensor_alloc(torch.device("cpu"))
    allocated = backend.allocate_tensor(100_000, dtype=torch.float32, device=torch.device("cpu")).fill_(1)
    dist.all_reduce(allocated)
    assert bool((allocated == dist.get_world_size()).all())


def is_in_shared_memory(tensor: torch.Tensor) -> bool:
    for line in Path("/proc/self/maps").read_text().splitlines():
        bounds, access, *_ = line.split()
        begin, end = (int(bound, 16) for bound in bounds.split("-"))
        if begin <= tensor.data_ptr() < end:
            return access.endswith("s")
    return False


# DDP compares a hook's annotations with its own types, which postponed annotations are not.
def in_shared_memory_hook(state, bucket):  # type: ignore[no-untyped-def]
    assert is_in_shared_memory(bucket.buffer()), "the gradient bucket is not in shared memory"
    return default_hooks.allreduce_hook(state, bucket)


def run_ddp(hosts: str) -> None:
    init_on(hosts)
    compare({}, {})
    assert not is_in_shared_memory(torch.ones(100_000))
    compare({}, {"hook": (dist.group.WORLD, in_shared_memory_hook)})
    compare({"accumulate": 2}, {"gradient_as_bucket_view": True})
    test_ddp.run_sparse_gradients()
    # Ranks of one host still share memory in a group of their own.
    rank, size = dist.get_rank(), dist.get_world_size()
    for host in sorted(set(hosts)):
        ranks = [other for other in range(size) if hosts[other] == host]
        group = dist.new_group(ranks)
        if rank in ranks:
            assert has_mailbox(group)
            tensor = torch.ones(5)
            dist.all_reduce(tensor, group=group)
            assert tensor[0] == len(ranks)


def run_dying(hosts: str) -> str:
    init_on(hosts)
    dist.all_reduce(torch.ones(1))
    meet_in_store("begun")
    if dist.get_rank() == 1:
        os._exit(3)
    with pytest.raises(dist.DistBackendError) as first:
        for _ in range(3):
            dist.all_reduce(torch.ones(10))
    with pytest.raises(dist.DistBackendError):
        dist.barrier()
    return str(first.value)


def run_dying_beside_another(hosts: str) -> tuple[str, float]:
    init_on(hosts)
    dist.all_reduce(torch.ones(1_000_000))
    meet_in_store("begun")
    if dist.get_rank() == 1:
        os._exit(3)
    begin = time.monotonic()
    with pytest.raises(dist.DistBackendError) as first:
        for _ in range(3):
            dist.all_reduce(torch.ones(1_000_000))
    return str(first.value), time.monotonic() - begin


def values(outcomes: list[Outcome]) -> list[Any]:
    for outcome in outcomes:
        assert outcome.kind == "value", outcome.text
    return [outcome.value for outcome in outcomes]


@pytest.mark.parametrize("hosts", ["ab", "aba", "abba"])
def test_every_collective_gives_what_plain_torch_gives(hosts: str) -> None:
    for failures in values(run_once(len(hosts), run_cases, hosts, backend=None)):
        assert failures == []


def test_every_form_of_call_works() -> None:
    values(run_once(3, run_forms, "aab", backend=None))


def test_ddp_trains_like_one_process_and_groups_within_a_host_share_memory() -> None:
    values(run_once(4, run_ddp, "abba", backend=None))


def test_the_death_of_a_rank_is_an_error_on_the_others() -> None:
    outcomes = run_once(3, run_dying, "aba", backend=None)
    assert outcomes[1].kind == "died"
    for rank in (0, 2):
        assert outcomes[rank].kind == "value", outcomes[rank].text
        assert re.search(r"rank 1 on \S+ has died or cannot be reached", outcomes[rank].value)


@pytest.mark.parametrize("hosts", ["aabb", "abbab", "aaab", "abcd", "abbca"])
def test_ranks_that_share_hosts_get_the_same_sums(hosts: str) -> None:
    checksums = values(run_once(len(hosts), run_sums_in_parts, hosts, backend=None))
    assert all(checksum == checksums[0] for checksum in checksums)


def test_a_death_is_an_error_on_the_hosts_that_only_wait_for_the_victims_host() -> None:
    outcomes = run_once(5, run_dying_beside_another, "aabba", backend=None)
    assert outcomes[1].kind == "died"
    told = [outcomes[rank] for rank in (0, 2, 3, 4)]
    for text, seconds in values(told):
        assert "a group that spans hosts" in text
        assert seconds < PATIENCE / 2  # long before the timeout
        assert re.search(r"rank 1 on \S+ has died", text), text
