"""send, recv and the mailbox: order, tags, any source, sizes, and that nobody's sending holds anybody up."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from opensmd.collectives import _torch_internals
from opensmd.collectives.mailbox import Mailbox, has_mailbox
from tests.support.ranks import RankPool

Pool = Callable[[int], RankPool]
SIZES = [0, 1, 3, 1000, 70_001, 3_000_000]


def numbered(count: int, rank: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return (torch.arange(count) % 100 + rank).to(dtype)


def run_ring() -> None:
    size, rank = dist.get_world_size(), dist.get_rank()
    right, left = (rank + 1) % size, (rank - 1) % size
    for count in SIZES:
        for dtype in (torch.float32, torch.int8, torch.bool, torch.complex64):
            received = torch.empty(count, dtype=dtype)
            sending = dist.isend(numbered(count, rank, dtype), right, tag=count % 7)
            assert dist.recv(received, left, tag=count % 7) == left
            sending.wait()
            assert sending.is_completed()
            assert torch.equal(received, numbered(count, left, dtype))


def run_everybody_sends_first() -> None:
    """Blocking sends of any size before any receive, in both directions and to oneself."""
    size, rank = dist.get_world_size(), dist.get_rank()
    for count in SIZES:
        works = [dist.isend(numbered(count, rank), to) for to in range(size) for _ in range(3)]
        for source in range(size):
            for _ in range(3):
                received = torch.empty(count)
                if source == rank:
                    dist.irecv(received, source).wait()
                else:
                    dist.recv(received, source)
                assert torch.equal(received, numbered(count, source))
        for work in works:
            work.wait()


def run_much_larger_than_the_caches() -> None:
    """From 24 MiB on payloads have a ring of their own; they keep their place among small messages."""
    size, rank = dist.get_world_size(), dist.get_rank()
    right, left = (rank + 1) % size, (rank - 1) % size
    counts = [7, 6_500_001, 9]
    works = [dist.isend(numbered(count, rank), right) for count in counts]
    for count in counts:
        received = torch.empty(count)
        dist.recv(received, left)
        assert torch.equal(received, numbered(count, left))
    for work in works:
        work.wait()


def run_tags_and_any_source() -> None:
    size, rank = dist.get_world_size(), dist.get_rank()
    if rank == 0:
        receiving = {tag: torch.empty(2) for tag in (5, 4, 3)}
        works = [dist.irecv(tensor, 1, tag=tag) for tag, tensor in receiving.items()]
        for work in works:
            work.wait()
        assert all(torch.equal(tensor, torch.full((2,), float(tag))) for tag, tensor in receiving.items())
    elif rank == 1:
        for tag in (3, 4, 5):
            dist.send(torch.full((2,), float(tag)), 0, tag=tag)
    dist.barrier()
    if rank == 0:
        heard = set()
        for _ in range(size - 1):
            tensor = torch.empty(1)
            source = dist.recv(tensor, tag=9)
            assert tensor.item() == source
            heard.add(source)
        assert heard == set(range(1, size))
    else:
        dist.send(torch.tensor([float(rank)]), 0, tag=9)
    part = dist.new_group([0, size - 1])
    if rank == 0:
        dist.send(torch.ones(3), size - 1, group=part)
    elif rank == size - 1:
        tensor = torch.empty(3)
        assert dist.recv(tensor, group=part) == 0


def run_strides() -> None:
    rank = dist.get_rank()
    if rank == 0:
        dist.send(torch.arange(12.0).view(3, 4).t(), 1)
    elif rank == 1:
        target = torch.zeros(4, 6)
        dist.recv(target[:, ::2], 0)
        assert torch.equal(target[:, ::2], torch.arange(12.0).view(3, 4).t())
        assert target[:, 1::2].count_nonzero() == 0


def run_batches() -> None:
    size, rank = dist.get_world_size(), dist.get_rank()
    right, left = (rank + 1) % size, (rank - 1) % size
    for count in (1, 500_000):
        received = [torch.empty(count), torch.empty(count)]
        batch = [
            dist.P2POp(dist.irecv, received[0], left),
            dist.P2POp(dist.isend, numbered(count, rank), right),
            dist.P2POp(dist.irecv, received[1], right),
            dist.P2POp(dist.isend, numbered(count, rank), left),
        ]
        if size == 2:  # both neighbours are one: the order decides
            batch = batch[:2]
        for work in dist.batch_isend_irecv(batch):
            work.wait()
        assert torch.equal(received[0], numbered(count, left))
        assert size == 2 or torch.equal(received[1], numbered(count, right))
    future = dist.isend(torch.ones(1), right).get_future()
    tensor = torch.empty(1)
    assert dist.irecv(tensor, left).get_future().wait()[0].item() == 1
    future.wait()
    objects = [None]
    if rank == 0:
        dist.send_object_list([{"a": 1}], 1)
    elif rank == 1:
        dist.recv_object_list(objects, 0)
        assert objects == [{"a": 1}]


def run_beside_collectives() -> None:
    size, rank = dist.get_world_size(), dist.get_rank()
    right, left = (rank + 1) % size, (rank - 1) % size
    failures = []

    def messages() -> None:
        for step in range(100):
            tensor = torch.empty(step * 50 + 1)
            work = dist.isend(numbered(len(tensor), rank), right)
            dist.recv(tensor, left)
            work.wait()
            if not torch.equal(tensor, numbered(len(tensor), left)):
                failures.append(step)

    thread = threading.Thread(target=messages)
    thread.start()
    for step in range(300):
        tensor = torch.full((step * 10 + 1,), float(step))
        dist.all_reduce(tensor)
        assert bool((tensor == step * size).all())
    thread.join()
    assert failures == []


def run_mailbox() -> None:
    size, rank = dist.get_world_size(), dist.get_rank()
    assert has_mailbox()
    box = Mailbox()
    right, left = (rank + 1) % size, (rank - 1) % size
    for count in SIZES:
        for tag in (2, 1):
            box.send(right, tag, numbered(count, rank + tag))
        dist.isend(torch.tensor([-1.0]), right, tag=1).wait()  # another world of tags
        assert box.wait_any([(left, 7), (left, 1)]) == 1
        assert box.ready(left, 1)
        for tag in (1, 2):
            received = box.receive(left, tag, count, torch.float32)
            assert torch.equal(received, numbered(count, left + tag))
        assert not box.ready(left, 3)
        received = torch.empty(1)
        dist.recv(received, left, tag=1)
        assert received.item() == -1
    box.flush()
    # As everywhere, a timeout ends its group.
    doomed = Mailbox(dist.new_group())
    with pytest.raises(dist.DistBackendError, match="Timed out"):
        doomed.wait_any([(left, 99)], timeout=timedelta(milliseconds=50))
    with pytest.raises(ValueError, match="one host"):
        Mailbox(dist.new_group(backend="gloo"))
    dist.barrier()
    box.send(rank, 0, torch.ones(2))
    assert torch.equal(box.receive(rank, 0, 2, torch.float32), torch.ones(2))
    dist.barrier()


def run_mailbox_that_goes() -> None:
    """What was received stays, though the sender's memory may be another's now."""
    rank, count = dist.get_rank(), 300_000
    group = dist.new_group()
    box = Mailbox(group)
    if rank == 0:
        box.send(1, 0, torch.ones(count))
    elif rank == 1:
        received = box.receive(0, 0, count, torch.float32)
    dist.barrier()
    if rank == 0:
        del box
        backend = _torch_internals.cpu_backend(group)
        backend.allocate_tensor(count, dtype=torch.float32, device=torch.device("cpu")).fill_(2)
    dist.barrier()
    assert rank != 1 or received.eq(1).all()


def run_dropped_handles() -> None:
    """What is under way keeps its memory, also when the program forgets that it is."""
    size, rank = dist.get_world_size(), dist.get_rank()
    right, left = (rank + 1) % size, (rank - 1) % size
    values = [float(index) for index in range(6)]
    for value in values:
        dist.isend(torch.full((1_000_000,), value), right)  # more than a ring takes at once
    dist.barrier()
    for value in values:
        received = torch.empty(1_000_000)
        dist.recv(received, left)
        assert received.eq(value).all(), f"{received.unique()} in place of {value}"
    dist.irecv(torch.empty(1_000_000, 2)[:, 0], left)  # into memory between
    others = [torch.full((1_000_000,), 3.0) for _ in range(4)]
    dist.barrier()
    dist.isend(torch.ones(1_000_000), right)
    dist.isend(torch.ones(1), right)
    dist.recv(torch.empty(1), left)
    assert all(other.eq(3).all() for other in others)


def run_send_behind_a_long_wait() -> None:
    """A send goes on though its rank has waited for something else meanwhile, and waits in a collective."""
    size, rank = dist.get_world_size(), dist.get_rank()
    if rank == 0:
        sending = dist.isend(numbered(3_000_000, rank), size - 1)  # more than a ring takes at once
        dist.recv(torch.empty(1), size - 1)
        dist.barrier()
        sending.wait()
        return
    if rank == size - 1:
        time.sleep(0.2)  # until rank 0's helper thread sleeps, because rank 0 itself looks at its messages
        dist.send(torch.ones(1), 0)
        time.sleep(0.1)
        received = torch.empty(3_000_000)
        dist.recv(received, 0)
        assert torch.equal(received, numbered(3_000_000, 0))
    dist.barrier()


def run_wrong_dtypes() -> None:
    """A message becomes what it was, or bytes; of the same size something else would be silent nonsense."""
    size, rank = dist.get_world_size(), dist.get_rank()
    right, left = (rank + 1) % size, (rank - 1) % size
    for count in (4, 100_000):
        sent = numbered(count, rank, torch.int32)
        told = f"sent {4 * count} bytes of int32 .* buffer takes {4 * count} bytes of float32"
        for early in (True, False):
            received = torch.zeros(count)
            if early:
                receiving = dist.irecv(received, left)
                dist.barrier()
            sending = dist.isend(sent, right)
            if not early:
                behind = dist.isend(sent, right, tag=1)
                dist.recv(torch.empty_like(sent), left, tag=1)  # the first one has come meanwhile
                behind.wait()
                receiving = dist.irecv(received, left)
            with pytest.raises(dist.DistBackendError, match=told):
                receiving.wait()
            sending.wait()
            assert not received.any()
        sending = dist.isend(sent.view(torch.uint8), right)
        received = torch.empty(count, dtype=torch.int32)
        dist.recv(received, left)
        sending.wait()
        assert torch.equal(received, numbered(count, left, torch.int32))


CASES = [
    run_wrong_dtypes,
    run_ring,
    run_everybody_sends_first,
    run_much_larger_than_the_caches,
    run_tags_and_any_source,
    run_strides,
    run_batches,
    run_beside_collectives,
    run_mailbox,
    run_mailbox_that_goes,
    run_dropped_handles,
    run_send_behind_a_long_wait,
]


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__.removeprefix("run_"))
def test_messages(pool: Pool, case: Callable[[], None], world_size: int) -> None:
    pool(world_size).run(case)
