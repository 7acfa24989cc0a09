"""What calls with CUDA tensors give back, how they meet streams and threads, and how batches make them."""

# mypy: disable-error-code="no-untyped-call, attr-defined"
# some of torch's own functions have no annotations
from __future__ import annotations

import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import torch.distributed.nn.functional as with_gradients
from torch.distributed.distributed_c10d import _coalescing_manager

import opensmd
from tests.cuda.test_collectives import everyones, mine, same, summed
from tests.support.cuda import DEVICE, MAPPED, CudaRanks
from tests.support.tried import tried

Gpus = Callable[[int], CudaRanks]


def ones(count: int) -> torch.Tensor:
    return torch.ones(count, device=DEVICE)


def handles_of_async_calls() -> None:
    size = dist.get_world_size()
    tensors = [mine(count) for count in (1, 100, 100_000)]
    works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
    for work, tensor in zip(works, tensors, strict=True):
        assert work.wait(timedelta(seconds=20))
        same(tensor, summed(len(tensor)))
        deadline = time.monotonic() + 20
        while not work.is_completed():
            assert time.monotonic() < deadline
        assert work.exception() is None
        assert work.get_future().wait()[0].data_ptr() == tensor.data_ptr()
    barrier = dist.barrier(async_op=True)
    barrier.wait()
    assert barrier.is_completed()
    future = dist.all_reduce(ones(3), async_op=True).get_future().then(lambda done: done.value()[0] * 2)
    same(future.wait(), 2 * size * ones(3))


def chains_of_futures() -> None:
    """A callback issues the next collective, of tensors of either device."""
    size = dist.get_world_size()
    for device in (DEVICE, "cpu"):
        second = torch.ones(2, device=device)

        def again(done: Any, second: torch.Tensor = second) -> torch.Tensor:
            second.mul_(done.value()[0][:2].to(second.device))
            dist.all_reduce(second)
            return second

        future = dist.all_reduce(ones(4), async_op=True).get_future().then(again)
        assert future.wait().tolist() == [size * size] * 2


def calls_on_a_stream_of_their_own() -> None:
    size = dist.get_world_size()
    stream = torch.cuda.Stream()
    work_here = torch.full((400, 400), 0.5, device=DEVICE)
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        tensor = work_here
        for _ in range(20):  # still being computed when the sum is asked for
            tensor = torch.tanh(tensor @ work_here)
        tensor = torch.full_like(tensor, 1.0) + 0 * tensor
        dist.all_reduce(tensor)
        handle = dist.all_reduce(tensor, async_op=True)
        handle.wait()
        tensor.mul_(2)
    torch.cuda.current_stream().wait_stream(stream)
    assert float(tensor[3, 3]) == float(tensor[-1, -1]) == 2.0 * size * size
    work_here.record_stream(stream)


def calls_of_other_threads() -> None:
    found: list[torch.Tensor] = []

    def call() -> None:
        found.append(mine(50))
        dist.all_reduce(found[0])
        dist.all_reduce(found[0], dist.ReduceOp.MAX, async_op=True).wait()

    thread = threading.Thread(target=call)
    thread.start()
    thread.join()
    same(found[0], summed(50))


def calls_of_backward() -> None:
    """Autograd runs them in the thread of the device."""
    rank, size = dist.get_rank(), dist.get_world_size()
    x = torch.full((4,), rank + 1.0, device=DEVICE, requires_grad=True)
    world = dist.group.WORLD

    def gradient(result: Any) -> float:
        x.grad = None
        torch.stack([part.sum() for part in result]).sum().backward()
        assert x.grad is not None
        return float(x.grad[0])

    out = [torch.empty(4, device=DEVICE) for _ in range(size)]
    assert gradient([with_gradients.all_reduce(x.clone(), group=world)]) == size
    assert gradient(with_gradients.all_gather(x, group=world)) == size
    assert gradient([with_gradients.broadcast(x, 0, group=world)]) == (size if rank == 0 else 0)
    assert gradient(with_gradients.all_to_all(out, [x * 2] * size, group=world)) == 2 * size


def coalesced_calls() -> None:
    size, rank = dist.get_world_size(), dist.get_rank()
    for async_ops in (False, True):
        many = [mine(count) for count in (1, 40, 3000)]
        with _coalescing_manager(async_ops=async_ops) as manager:
            for one in many:
                dist.all_reduce(one)
        if async_ops:
            manager.wait()
        for one in many:
            same(one, summed(len(one)))
        wholes = [torch.empty(size * count, device=DEVICE) for count in (1, 40)]
        with _coalescing_manager(async_ops=async_ops) as manager:
            for whole in wholes:
                dist.all_gather_into_tensor(whole, mine(len(whole) // size))
        if async_ops:
            manager.wait()
        for whole in wholes:
            same(whole, torch.cat(everyones(len(whole) // size)))
        parts = [torch.empty(count, device=DEVICE) for count in (1, 40)]
        with _coalescing_manager(async_ops=async_ops) as manager:
            for part in parts:
                dist.reduce_scatter_tensor(part, mine(len(part) * size))
        if async_ops:
            manager.wait()
        for part in parts:
            same(part, summed(len(part) * size).chunk(size)[rank])


def coalesced_calls_of_the_old_form() -> None:
    """With a device the calls go to the backend one by one, between its marks of begin and end."""
    for first, second in ((DEVICE, DEVICE), (DEVICE, "cpu"), ("cpu", DEVICE)):
        one, other = mine(30).to(first), mine(20).to(second)
        with _coalescing_manager(device=torch.device(first), async_ops=True) as manager:
            dist.broadcast(one, 0, async_op=True)
            dist.broadcast(other, 1, async_op=True)
        manager.wait()
        assert torch.equal(one, mine(30, rank=0).to(first))
        assert torch.equal(other, mine(20, rank=1).to(second))
    group: Any = dist.group.WORLD
    tensors = [mine(3), mine(4)]
    group.allreduce_coalesced(tensors).wait()
    same(torch.cat(tensors), torch.cat([summed(3), summed(4)]))


def a_batch_that_an_error_ended() -> None:
    """The next batch begins anew."""
    with pytest.raises(KeyError), _coalescing_manager(device=torch.device("cpu")):
        raise KeyError
    dist.distributed_c10d._world.pg_coalesce_state.clear()
    other = 1 - dist.get_rank()
    received = torch.empty(3)
    calls = [dist.P2POp(dist.isend, mine(3).cpu(), other), dist.P2POp(dist.irecv, received, other)]
    for work in dist.batch_isend_irecv(calls):
        work.wait()
    assert torch.equal(received, mine(3, rank=other).cpu())


def functional_collectives() -> None:
    size, rank = dist.get_world_size(), dist.get_rank()
    group = dist.group.WORLD
    same(functional.all_reduce(mine(3), "sum", group) + 0, summed(3))
    same(functional.all_gather_tensor(mine(2), 0, group) + 0, torch.cat(everyones(2)))
    scattered = functional.reduce_scatter_tensor(mine(2 * size), "sum", 0, group)
    same(scattered + 0, summed(2 * size).chunk(size)[rank])
    several = functional.all_reduce_coalesced([mine(2), mine(3)], "sum", group)
    for got, count in zip(several, (2, 3), strict=True):
        same(got + 0, summed(count))
    gathered = functional.all_gather_into_tensor_coalesced([mine(2), mine(3)], group)
    for got, count in zip(gathered, (2, 3), strict=True):
        same(got + 0, torch.cat(everyones(count)))
    exchanged = functional.all_to_all_single(
        torch.full((size,), float(rank), device=DEVICE), None, None, group
    )
    same(exchanged + 0, torch.arange(float(size), device=DEVICE))
    same(functional.broadcast(mine(4), 1, group) + 0, mine(4, rank=1))


def objects() -> None:
    size, rank = dist.get_world_size(), dist.get_rank()
    found: list[Any] = [None] * size
    dist.all_gather_object(found, {"rank": rank, "tensor": mine(3)})
    for other, value in enumerate(found):
        assert value["rank"] == other
        same(value["tensor"], mine(3, rank=other))
    for device in (None, torch.device(DEVICE)):
        said: list[Any] = [f"of {rank}", (rank, rank)]
        dist.broadcast_object_list(said, src=1, device=device)
        assert said == ["of 1", (1, 1)]
        if rank == 0:
            dist.send_object_list([{"a": 1}], dst=1, device=device)
        else:
            got: list[Any] = [None]
            dist.recv_object_list(got, src=0, device=device)
            assert got == [{"a": 1}]
    mine_alone: list[Any] = [None]
    dist.scatter_object_list(mine_alone, [f"for {other}" for other in range(size)] if rank == 0 else None)
    assert mine_alone == [f"for {rank}"]


def calls_without_python() -> None:
    """``opensmd.direct`` and ``torch.ops.opensmd``."""
    size, rank = dist.get_world_size(), dist.get_rank()
    group = opensmd.direct()
    assert dist.group.WORLD is not None
    name = dist.group.WORLD.group_name
    tensor = mine(6)
    group.all_reduce_(tensor)
    torch.ops.opensmd.all_reduce_(tensor, "max", name)
    same(tensor, summed(6))
    group.broadcast_(tensor.fill_(rank), 1)
    same(tensor, ones(6))
    whole = torch.empty(size * 2, device=DEVICE)
    group.all_gather_into_(whole, mine(2))
    same(whole, torch.cat(everyones(2)))
    part = torch.empty(2, device=DEVICE)
    group.reduce_scatter_into_(part, mine(size * 2), "avg")
    same(part, summed(size * 2).chunk(size)[rank] / size)
    torch.ops.opensmd.all_to_all_into_(whole, torch.full((2 * size,), float(rank), device=DEVICE), name)
    same(whole, torch.arange(float(size), device=DEVICE).repeat_interleave(2))


def barriers_that_name_ranks() -> None:
    dist.monitored_barrier(timeout=timedelta(seconds=20), wait_all_ranks=True)


def profiles() -> None:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        dist.all_reduce(ones(4))
        dist.all_reduce(ones(4), async_op=True).wait()
        dist.all_reduce(torch.ones(4))
    names = [event.name for event in profile.events()]
    assert names.count("smddp:all_reduce") == (3 if MAPPED else 1), names
    assert MAPPED or sum(name.startswith("nccl:all_reduce") for name in names) >= 2, names


def tensors_of_both_devices_in_one_call() -> None:
    """Refused before anything is sent, with either device first."""
    size = dist.get_world_size()
    here, there = torch.ones(2), ones(2)
    wide_here, wide_there = torch.ones(2 * size), ones(2 * size)
    mixed = [torch.ones(2) for _ in range(size - 1)] + [there]
    wrong: dict[str, Callable[[], Any]] = {
        "all_gather_into_tensor 1": lambda: dist.all_gather_into_tensor(wide_there, here),
        "all_gather_into_tensor 2": lambda: dist.all_gather_into_tensor(wide_here, there),
        "reduce_scatter_tensor 1": lambda: dist.reduce_scatter_tensor(here, wide_there),
        "reduce_scatter_tensor 2": lambda: dist.reduce_scatter_tensor(there, wide_here),
        "all_gather": lambda: dist.all_gather(mixed, here),
        "all_to_all_single 1": lambda: dist.all_to_all_single(wide_there, wide_here),
        "all_to_all_single 2": lambda: dist.all_to_all_single(wide_here, wide_there),
        "reduce_scatter": lambda: dist.reduce_scatter(here, mixed),
        "direct": lambda: opensmd.direct().all_gather_into_(wide_there, here),
        "coalesced": lambda: functional.all_gather_into_tensor_coalesced([there, here], dist.group.WORLD),
    }
    taken = []
    for name, call in wrong.items():
        try:
            call()
        except (ValueError, RuntimeError, TypeError):
            continue
        taken.append(name)
    assert not taken
    dist.all_reduce(there)
    same(there, size * ones(2))


CHECKS = [
    handles_of_async_calls,
    chains_of_futures,
    calls_on_a_stream_of_their_own,
    calls_of_other_threads,
    calls_of_backward,
    coalesced_calls,
    coalesced_calls_of_the_old_form,
    a_batch_that_an_error_ended,
    functional_collectives,
    objects,
    calls_without_python,
    barriers_that_name_ranks,
    profiles,
]
# what only a GPU has: a second device beside the CPU
CHECKS_OF_TWO_DEVICES = [*CHECKS, tensors_of_both_devices_in_one_call]


def test_calls_with_cuda_tensors_behave_as_those_of_the_cpu(gpus: Gpus) -> None:
    for failures in gpus(2).run(
        tried, CHECKS if MAPPED else CHECKS_OF_TWO_DEVICES, timeout=60, group_timeout=30
    ):
        assert not failures, "\n".join(failures)
