"""Forms of tensors and calls that the table leaves out: strides, lists, sparse, async, threads, objects."""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from opensmd.collectives import _torch_internals
from tests.support.ranks import RankPool

Pool = Callable[[int], RankPool]


def everyone(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Every rank's tensor, by way of pickles."""
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, tensor)
    return found


def mine(*shape: int, dtype: torch.dtype = torch.float32, rank: int | None = None) -> torch.Tensor:
    rank = dist.get_rank() if rank is None else rank
    generator = torch.Generator().manual_seed(rank)
    return torch.randint(-9, 10, shape, generator=generator).to(dtype)


def all_of(*shape: int, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    return [mine(*shape, dtype=dtype, rank=rank) for rank in range(dist.get_world_size())]


def run_strides() -> None:
    size, rank = dist.get_world_size(), dist.get_rank()
    total = torch.stack(all_of(6, 4)).sum(0)
    transposed = mine(6, 4).t()
    dist.all_reduce(transposed)
    assert torch.equal(transposed.t(), total)
    wide = torch.zeros(6, 9)
    wide[:, 1::2].copy_(mine(6, 4))
    dist.all_reduce(wide[:, 1::2], async_op=True).wait()
    assert torch.equal(wide[:, 1::2], total)
    assert wide[:, ::2].count_nonzero() == 0
    images = mine(2, 3, 4, 5).to(memory_format=torch.channels_last)
    dist.all_reduce(images)
    assert torch.equal(images, torch.stack(all_of(2, 3, 4, 5)).sum(0))
    board = torch.zeros(4, size)
    dist.all_gather([board[:, i] for i in range(size)], mine(4))
    assert torch.equal(board, torch.stack(all_of(4), 1))
    target = torch.zeros(3, 8)
    target[:, 2:4] = float(rank)
    dist.broadcast(target[:, 2:4], 1)
    assert torch.equal(target[:, 2:4], torch.ones(3, 2)) and target[:, 4:].count_nonzero() == 0
    output = torch.zeros(4, 6)
    dist.reduce_scatter(output[:, ::2], [mine(3, 4).t() for _ in range(size)])
    assert torch.equal(output[:, ::2], torch.stack(all_of(3, 4)).sum(0).t())
    output = torch.zeros(5, size).t()
    dist.all_to_all_single(output, torch.full((size, 5), float(rank)))
    assert torch.equal(output, torch.arange(float(size)).repeat(5, 1).t())


def run_shapes() -> None:
    """The tensor forms count elements: shapes are the caller's business, as with NCCL."""
    size, rank = dist.get_world_size(), dist.get_rank()
    output = torch.empty(size)
    dist.all_gather_single(output, torch.tensor(float(rank)))
    assert torch.equal(output, torch.arange(float(size)))
    stacked = torch.empty(size, 2, 3)
    dist.all_gather_single(stacked, mine(2, 3))
    assert torch.equal(stacked, torch.stack(all_of(2, 3)))
    joined = torch.empty(size * 2, 3)
    dist.all_gather_single(joined, mine(2, 3))
    assert torch.equal(joined, torch.cat(all_of(2, 3)))
    scalar = torch.tensor(0.0)
    dist.reduce_scatter_single(scalar, torch.arange(float(size)))
    assert scalar.item() == rank * size
    output = torch.empty(2, 2)
    dist.reduce_scatter_single(output, torch.ones(size * 4))
    assert torch.equal(output, torch.full((2, 2), float(size)))


def run_uneven_lists() -> None:
    size, rank = dist.get_world_size(), dist.get_rank()
    outputs = [torch.empty(3 * i) for i in range(size)]
    dist.all_gather(outputs, torch.full((3 * rank,), float(rank)))
    assert all(torch.equal(got, torch.full((3 * i,), float(i))) for i, got in enumerate(outputs))
    output = torch.empty(2 * rank + 1)
    dist.reduce_scatter(output, [torch.full((2 * i + 1,), float(rank)) for i in range(size)])
    assert torch.equal(output, torch.full((2 * rank + 1,), float(sum(range(size)))))


def run_in_place() -> None:
    size, rank = dist.get_world_size(), dist.get_rank()
    for count in (5, 40_000):
        whole = torch.zeros(size, count)
        whole[rank] = mine(count)
        dist.all_gather_single(whole, whole[rank])
        assert torch.equal(whole, torch.stack(all_of(count)))
        dist.reduce_scatter_single(whole[rank], whole)
        assert torch.equal(whole[rank], mine(count, rank=rank) * size)
        exchanged = torch.stack([torch.full((count,), float(10 * rank + i)) for i in range(size)])
        dist.all_to_all_single(exchanged, exchanged)
        assert torch.equal(exchanged[:, 0], torch.tensor([10.0 * i + rank for i in range(size)]))
        run_overlapping(count)


def run_overlapping(count: int) -> None:
    """Inputs that lie where results come, but not where NCCL allows it."""
    size, rank = dist.get_world_size(), dist.get_rank()
    whole = mine(count).repeat(size, 1)
    shifted = [*whole[1:], whole[0]]
    dist.all_gather(shifted, whole[rank])
    assert torch.equal(torch.stack(shifted), torch.stack(all_of(count)))
    whole = mine(count).repeat(size, 1)
    dist.gather(whole[1], list(whole) if rank == 0 else None, 0)
    assert rank != 0 or torch.equal(whole, torch.stack(all_of(count)))
    given = torch.stack(all_of(count))
    room = given[1] if rank == 0 else torch.empty(count)
    dist.scatter(room, list(given) if rank == 0 else None, 0)
    assert torch.equal(room, mine(count))
    whole = torch.zeros(size * count)
    whole[1 : count + 1] = mine(count)
    dist.all_gather_single(whole, whole[1 : count + 1])
    assert torch.equal(whole.view(size, count), torch.stack(all_of(count)))
    whole = torch.stack(all_of(count))
    room = whole.flatten()[1 : count + 1]
    dist.reduce_scatter_single(room, whole)
    assert torch.equal(room, mine(count) * size)
    whole = torch.stack(all_of(count))
    dist.reduce_scatter(whole[rank - 1], list(whole))
    assert torch.equal(whole[rank - 1], mine(count) * size)
    exchanged = torch.stack([torch.full((count,), float(10 * rank + i)) for i in range(size)])
    dist.all_to_all(list(exchanged), list(exchanged))
    assert torch.equal(exchanged[:, -1], torch.tensor([10.0 * i + rank for i in range(size)]))


def run_coalesced() -> None:
    size, rank = dist.get_world_size(), dist.get_rank()
    from torch.distributed.distributed_c10d import _coalescing_manager

    many = [mine(n) for n in (1, 40, 3000, 0, 77_777)]
    with _coalescing_manager():
        for one in many:
            dist.all_reduce(one)
    for one in many:
        assert torch.equal(one, torch.stack(all_of(len(one))).sum(0))
    outputs = [torch.empty(size * n) for n in (1, 40, 3000)]
    with _coalescing_manager(async_ops=True) as manager:
        for output in outputs:
            dist.all_gather_single(output, mine(len(output) // size))
    manager.wait()
    for output in outputs:
        assert torch.equal(output, torch.cat(all_of(len(output) // size)))
    outputs = [torch.empty(n) for n in (1, 40, 3000)]
    with _coalescing_manager(device=torch.device("cpu")):
        for output in outputs:
            dist.reduce_scatter_single(output, mine(len(output) * size))
    for output in outputs:
        n = len(output)
        assert torch.equal(output, torch.stack(all_of(n * size)).sum(0)[rank * n : rank * n + n])
    lists = [[torch.empty(3), torch.empty(2, 2)] for _ in range(size)]
    dist.group.WORLD.allgather_coalesced(lists, [mine(3), mine(2, 2)]).wait()
    for got, first, second in zip(lists, all_of(3), all_of(2, 2), strict=True):
        assert torch.equal(got[0], first) and torch.equal(got[1], second)


def run_sparse() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    for values in (torch.ones(3), torch.ones(3, 2), torch.ones(3, dtype=torch.int64)):
        shape = (9, *values.shape[1:])
        sparse = torch.sparse_coo_tensor([[rank, 4, 8 - rank]], values, shape)
        dense = sparse.to_dense()
        dist.all_reduce(sparse)
        dist.all_reduce(dense)
        assert torch.equal(sparse.to_dense(), dense)
    empty = torch.sparse_coo_tensor(torch.empty(1, 0, dtype=torch.int64), torch.empty(0), (4,))
    work = dist.all_reduce(empty, async_op=True)
    work.wait()
    assert empty._nnz() == 0
    with pytest.raises(ValueError, match="can only sum"):
        dist.all_reduce(torch.eye(size).to_sparse(), dist.ReduceOp.MAX)
    # Places that only some ranks have, and the group goes on.
    for others in (torch.eye(99), torch.eye(2, 3)):
        with pytest.raises(dist.DistBackendError, match=r"Float of shape \[2, 2\] and sparse_dim 2"):
            dist.all_reduce((torch.eye(2) if rank == 0 else others).to_sparse())
    sparse = torch.eye(2).to_sparse()
    dist.all_reduce(sparse)
    assert torch.equal(sparse.to_dense(), size * torch.eye(2))


def run_premultiplied() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        tensor = torch.full((5,), 2.0, dtype=dtype)
        dist.all_reduce(tensor, dist._make_nccl_premul_sum(float(rank)))
        assert torch.equal(tensor, torch.full((5,), 2.0 * sum(range(size)), dtype=dtype))
    tensor = torch.ones(5)
    dist.all_reduce(tensor, dist._make_nccl_premul_sum(torch.tensor([3.0])))
    assert torch.equal(tensor, torch.full((5,), 3.0 * size))


def run_random_floats() -> None:
    size = dist.get_world_size()
    for dtype, tolerance in ((torch.float32, 1e-6), (torch.float16, 2e-3), (torch.bfloat16, 1e-2)):
        for count in (11, 3001, 300_007):
            inputs = [
                torch.randn(count, generator=torch.Generator().manual_seed(rank)).to(dtype)
                for rank in range(size)
            ]
            tensor = inputs[dist.get_rank()].clone()
            dist.all_reduce(tensor)
            exact = torch.stack([one.double() for one in inputs]).sum(0)
            torch.testing.assert_close(tensor.double(), exact, rtol=tolerance, atol=tolerance)
            hashes = everyone(tensor.view(torch.uint8).long().cumsum(0)[-8:])
            assert all(torch.equal(other, hashes[0]) for other in hashes)


def run_async() -> None:
    size = dist.get_world_size()
    total = sum(range(1, size + 1))
    tensors = [torch.full((n,), float(dist.get_rank() + 1)) for n in (1, 1000, 200_000) for _ in range(10)]
    works = [dist.all_reduce(part, async_op=True) for part in tensors]
    last = torch.ones(4)
    dist.all_reduce(last)  # takes its turn after all of them
    assert all(bool((part == total).all()) for part in tensors)
    for work, tensor in zip(works, tensors, strict=True):
        assert work.wait(timedelta(seconds=20))
        assert work.is_completed() and work.is_success()
        assert work.result()[0].data_ptr() == tensor.data_ptr()
        assert work.get_future().wait()[0].data_ptr() == tensor.data_ptr()
    chained = torch.ones(3)
    future = dist.all_reduce(chained, async_op=True).get_future().then(lambda done: done.value()[0] * 2)
    assert torch.equal(future.wait(), torch.full((3,), 2.0 * size))
    # A callback may itself call collectives, sync or not.
    second = torch.ones(2)

    def again(done: Any) -> torch.Tensor:
        dist.all_reduce(second)
        return second

    future = dist.all_reduce(torch.ones(2), async_op=True).get_future().then(again)
    assert torch.equal(future.wait(), torch.full((2,), float(size)))
    barrier = dist.barrier(async_op=True)
    barrier.wait()
    assert barrier.is_completed()


def run_callbacks_in_order() -> None:
    """Whether a call is done when a callback is attached, or long after: what that issues has one place."""
    rank, store = dist.get_rank(), dist.distributed_c10d._get_default_store()
    found: list[torch.Tensor] = []

    def of_callback(_: Any) -> None:
        found.append(mine(7))
        dist.all_reduce(found[-1])

    for name, behind in (("asked at once", 0), ("asked later", 2)):
        if rank == 0:
            store.wait([f"{name} {other}" for other in range(1, dist.get_world_size())])
        parts = [mine(count) for count in (3, 4, 5, 6)]
        works = []
        for number, part in enumerate(parts):
            works.append(dist.all_reduce(part, async_op=True))
            if rank == 0:
                works[-1].wait()
            if number == behind:
                future = works[0].get_future().then(of_callback)
        store.set(f"{name} {rank}", "")
        future.wait()
        for work, part in zip(works, parts, strict=True):
            work.wait()
            assert torch.equal(part, torch.stack(all_of(len(part))).sum(0))
        assert torch.equal(found[-1], torch.stack(all_of(7)).sum(0))
    work = dist.all_reduce(torch.ones(1), async_op=True)
    work.get_future().then(lambda _: work.wait()).wait()


def run_inference_tensors() -> None:
    """Only in inference mode may they be written to, and no other thread is in it, nor who waits later."""
    size, rank = dist.get_world_size(), dist.get_rank()
    with torch.inference_mode():
        reduced, received = mine(4, 2).t(), torch.empty(3, 2).t()
        gathered = [torch.empty(3, 2).t() for _ in range(size)]
        sparse = torch.sparse_coo_tensor(torch.tensor([[0, 1]]), torch.ones(2), (3,))
        works = [
            dist.all_reduce(reduced, async_op=True),
            dist.all_gather(gathered, mine(3, 2).t(), async_op=True),
            dist.all_reduce(sparse, async_op=True),
        ]
        receive = dist.irecv(received, (rank - 1) % size)
        dist.send(mine(3, 2).t(), (rank + 1) % size)
    for work in works:
        work.get_future().wait()
    receive.wait()
    assert torch.equal(reduced, torch.stack(all_of(4, 2)).sum(0).t())
    assert torch.equal(torch.stack(gathered), torch.stack(all_of(3, 2)).transpose(1, 2))
    assert torch.equal(received, mine(3, 2, rank=(rank - 1) % size).t())
    assert sparse.to_dense().tolist() == [size, size, 0]


def run_profiled() -> None:
    """Profilers see sync calls and async ones alike, with the shapes of what goes in, and nothing of Gloo.

    Its messages may end after the profile, and torch would note that in memory that was the profile's.
    """
    size, rank = dist.get_world_size(), dist.get_rank()
    into = torch.empty(2 * size, 3)
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], record_shapes=True
    ) as profile:
        dist.all_reduce(torch.ones(2, 3))
        dist.all_reduce(torch.ones(4), async_op=True).wait()
        dist.all_gather_single(into, torch.ones(2, 3))
        dist.all_gather(list(into.chunk(size)), torch.ones(2, 3))
        dist.scatter(torch.empty(5), [torch.ones(5)] * size if rank == 0 else [], 0)
        dist.barrier()
        dist.send(torch.ones(7), (rank + 1) % size)
        dist.recv(torch.empty(7))
    seen = [
        (event.name.removeprefix("smddp:"), event.input_shapes, event.is_async)
        for event in sorted(profile.events(), key=lambda event: event.time_range.start)
        if event.name.startswith(("smddp:", "gloo:"))
    ]
    assert seen == [
        ("all_reduce", [[2, 3]], True),
        ("all_reduce", [[4]], True),
        ("all_gather_into_tensor", [[2, 3]], True),
        ("all_gather", [[2, 3]], True),
        ("scatter", [[5]] * size if rank == 0 else [], True),
        ("barrier", [], True),
        ("send", [[7]], True),
        ("recvAnySource", [[7]], True),  # as torch's other backends call it
    ]


def run_outliving_a_profile() -> None:
    """With torch's own works, each would note its end in the profile's memory, whosever that is by then."""
    size, rank = dist.get_world_size(), dist.get_rank()
    right, left = (rank + 1) % size, (rank - 1) % size
    count, written = 20, b"\x5a" * 4096

    def reduce() -> list[Any]:
        return [dist.all_reduce(torch.ones(1), async_op=True) for _ in range(count)]

    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
        receives = [dist.irecv(torch.empty(1), left) for _ in range(count)]
        reductions = reduce() if rank == 0 else []
    blocks = [bytearray(written) for _ in range(2000)]
    for _ in range(count):
        dist.send(torch.ones(1), right)
    for receive in receives:
        receive.wait()
    if rank != 0:  # rank 1 has heard from rank 0, whose profile is over
        reductions = reduce()
    for reduction in reductions:
        reduction.wait()
    assert all(block == written for block in blocks)


def run_threads() -> None:
    """A group a thread, and one that two threads use in an order that a lock makes the same on all ranks."""
    size = dist.get_world_size()
    groups = [dist.new_group() for _ in range(4)]
    failures: list[str] = []

    def work(group: Any, number: int) -> None:
        for step in range(200):
            tensor = torch.full((number * 100 + 1,), float(step))
            work = dist.all_reduce(tensor, group=group, async_op=step % 3 == 0)
            if work is not None:
                work.wait()
            if not bool((tensor == step * size).all()):
                failures.append(f"group {number} step {step}: {tensor[:3]}")

    threads = [threading.Thread(target=work, args=(group, i)) for i, group in enumerate(groups)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []


def run_objects() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    found: list[Any] = [None] * size
    dist.all_gather_object(found, {"rank": rank, "text": "x" * 1000 * rank})
    assert [item["rank"] for item in found] == list(range(size))
    objects: list[Any] = [{"a": 1}, "b", None] if rank == 1 else [None, None, None]
    dist.broadcast_object_list(objects, 1)
    assert objects == [{"a": 1}, "b", None]
    gathered: list[Any] | None = [None] * size if rank == 0 else None
    dist.gather_object((rank,), gathered, 0)
    assert gathered is None or gathered == [(i,) for i in range(size)]
    got: list[Any] = [None]
    dist.scatter_object_list(got, [f"for {i}" for i in range(size)] if rank == 0 else None, 0)
    assert got == [f"for {rank}"]


def run_wrong_arguments() -> None:
    """Refused before anything moves, so that the group still works."""
    size = dist.get_world_size()
    with pytest.raises(ValueError, match="elements"):
        dist.all_gather_single(torch.empty(3 * size + 1), torch.empty(3))
    with pytest.raises(ValueError, match="add up"):
        dist.all_to_all_single(torch.empty(size), torch.empty(size), [size + 1] + [0] * (size - 1), None)
    with pytest.raises(ValueError, match="in its list"):
        dist.all_gather([torch.empty(1)] * (size + 1), torch.empty(1))
    with pytest.raises(NotImplementedError, match=r"band for Float.*tensor\.long\(\)"):
        dist.all_reduce(torch.ones(2), dist.ReduceOp.BAND)
    with pytest.raises(NotImplementedError, match=r"avg for Bool.*tensor\.float\(\)"):
        dist.all_reduce(torch.ones(2, dtype=torch.bool), dist.ReduceOp.AVG)
    with pytest.raises(ValueError, match="timeout of a group must be longer than 0 s, got -3 s"):
        dist.new_group(timeout=timedelta(seconds=-3))
    with pytest.raises(TypeError, match="pg_options must be options of a backend, got 5"):
        dist.new_group(pg_options=5)
    tensor = torch.ones(1)
    dist.all_reduce(tensor)
    assert tensor.item() == size
    # Of as many elements in all, and a group of its own, which does not go on.
    rank, group = dist.get_rank(), dist.new_group()
    with pytest.raises(
        dist.DistBackendError, match=r"rank 0.* called .*elements by rank \[2, 3.*by rank \[3, 2"
    ):
        dist.reduce_scatter(torch.empty(2), [torch.ones(2 + (of != rank)) for of in range(size)], group=group)


def run_allocated() -> None:
    """Tensors in the arena give the same results, may outlive their use, and their memory comes back."""
    size = dist.get_world_size()
    backend = dist.group.WORLD._get_backend(torch.device("cpu"))
    core = _torch_internals.shared_group(None)
    assert backend.supports_tensor_alloc(torch.device("cpu"))
    for count in (1, 100, 5000, 70_001, 1_000_003):
        for dtype in (torch.float32, torch.bfloat16, torch.complex64):
            tensor = backend.allocate_tensor(count, dtype=dtype, device=torch.device("cpu"))
            assert core.heap_contains(tensor) and tensor.dtype == dtype
            tensor.fill_(float(dist.get_rank() + 1))
            dist.all_reduce(tensor)
            assert bool((tensor == sum(range(1, size + 1))).all())
            tensor.fill_(float(dist.get_rank() + 1))
            gathered = torch.empty(size * count, dtype=dtype)
            dist.all_gather_single(gathered, tensor)
            assert gathered.view(size, count)[:, -1].tolist() == list(range(1, size + 1))
            dist.broadcast(tensor, 1)
            assert bool((tensor == 2).all())
    # Far more in all than the heap holds at once.
    first = None
    for _ in range(50):
        tensor = backend.allocate_tensor(4_000_000, dtype=torch.float32, device=torch.device("cpu"))
        assert core.heap_contains(tensor)
        first = first or tensor.data_ptr()
    # Only some ranks have theirs in the arena.
    mixed = tensor if dist.get_rank() == 0 else torch.empty(4_000_000)
    mixed.fill_(1.0)
    dist.all_reduce(mixed)
    assert bool((mixed == size).all())


def run_huge() -> None:
    """More than 2^31 elements."""
    count = 2**31 + 5
    tensor = torch.ones(count, dtype=torch.uint8)
    dist.all_reduce(tensor)
    assert int(tensor[:3].sum()) == int(tensor[-3:].sum()) == 3 * dist.get_world_size()
    assert int(tensor[:: 2**20].sum(dtype=torch.int64)) == 2 * len(tensor[:: 2**20])
    tensor[-1] = 50 + dist.get_rank()
    dist.broadcast(tensor, 1)
    assert int(tensor[-1]) == 51


def run_freed() -> None:
    """A tensor whose memory was freed is refused, and the group goes on."""
    tensor = torch.ones(1000)
    tensor.untyped_storage().resize_(0)
    peer = (dist.get_rank() + 1) % dist.get_world_size()
    for call in (
        lambda: dist.all_reduce(tensor),
        lambda: dist.all_gather_single(torch.empty(1000 * dist.get_world_size()), tensor),
        lambda: dist.send(tensor, peer),
    ):
        with pytest.raises(ValueError, match="memory was freed"):
            call()
    dist.barrier()


CASES = [
    run_strides,
    run_shapes,
    run_uneven_lists,
    run_in_place,
    run_coalesced,
    run_sparse,
    run_premultiplied,
    run_random_floats,
    run_async,
    run_callbacks_in_order,
    run_inference_tensors,
    run_profiled,
    run_outliving_a_profile,
    run_threads,
    run_objects,
    run_wrong_arguments,
    run_freed,
    run_allocated,
]


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__.removeprefix("run_"))
def test_form(pool: Pool, case: Callable[[], None], world_size: int) -> None:
    pool(world_size).run(case)


def test_tensors_of_more_than_two_to_the_31_elements_are_reduced_and_broadcast(pool: Pool) -> None:
    pool(2).run(run_huge)
