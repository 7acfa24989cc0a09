"""Messages of groups that span hosts: between ranks of one host they go in shared memory.

Hosts are made of this one by giving ranks different identities, as in ``test_two_hosts``.
"""

from __future__ import annotations

import os
import re
import time
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from opensmd.collectives import _torch_internals
from tests.hosts.test_two_hosts import init_on, values
from tests.support.patience import PATIENCE
from tests.support.ranks import run_once
from tests.support.timeouts import meet_in_store


def one(value: float) -> torch.Tensor:
    return torch.tensor([float(value)])


def received(source: int | None, tag: int) -> tuple[int, float]:
    """Who sent the next message with this tag, and what."""
    tensor = torch.empty(1)
    return dist.recv(tensor, source, tag=tag), tensor.item()


def run_in_shared_memory() -> None:
    """Over Gloo a send waits for its receive, which comes behind the barrier."""
    rank = dist.get_rank()
    if rank == 0:
        dist.send(torch.arange(1000), 1)
    dist.barrier()
    if rank == 1:
        tensor = torch.empty(1000, dtype=torch.int64)
        dist.recv(tensor, 0)
        assert torch.equal(tensor, torch.arange(1000))
        with pytest.raises(dist.DistBackendError, match=r"rank 0 on \S+ sent 4 bytes of int32 .* of float32"):
            received(0, 1)
    elif rank == 0:
        dist.send(torch.ones(1, dtype=torch.int32), 1, tag=1)


def run_until_somebody_asks_for_any_source() -> None:
    """Then rank 1 hears the other host as well, and no message changes its place or is lost."""
    rank = dist.get_rank()
    if rank == 0:
        for value in (1, 2):
            dist.send(one(value), 1, tag=4)  # before rank 1 wants them
    waiting = torch.empty(1)
    if rank == 1:
        work = dist.irecv(waiting, 0, tag=3)
    dist.barrier()
    if rank == 2:
        dist.send(one(7), 1, tag=5)
    elif rank == 1:
        assert received(None, 5) == (2, 7)
    dist.barrier()
    if rank == 0:
        for value, tag in ((3, 4), (8, 3), (9, 5)):
            dist.isend(one(value), 1, tag=tag).wait()
    elif rank == 1:
        assert received(0, 4) == (0, 1)
        assert received(None, 4) == (0, 2)
        assert received(None, 4) == (0, 3)
        work.wait()
        assert waiting.item() == 8
        assert received(0, 5) == (0, 9)


def run_while_everybody_sends(group: dist.ProcessGroup) -> None:
    """Rank 1 asks for any source while messages of its own host are on their way, some larger than a ring."""
    rank, rounds, count = dist.get_rank(), 20, 700_000
    if rank == 1:
        seen: dict[int, list[float]] = {0: [], 2: []}
        for _ in range(2 * rounds):
            tensor = torch.empty(count)
            source = dist.recv(tensor, group=group)
            assert bool((tensor == tensor[0]).all())
            seen[source].append(tensor[0].item())
        assert seen == {0: list(range(rounds)), 2: list(range(rounds))}
    else:
        for value in range(rounds):
            dist.send(torch.full((count,), float(value)), 1, group=group)


def run_receives_that_are_given_up() -> None:
    """Nobody waits for them: not who drops a handle, nor longer than a wait is given."""
    begin = time.monotonic()
    if dist.get_rank() == 0:
        work = dist.irecv(torch.empty(1), 2, tag=6)
        assert not work.is_completed()
        del work
    dist.barrier()
    doomed = dist.new_group()
    if dist.get_rank() == 0:
        work = dist.irecv(torch.empty(1), 2, doomed)
        assert not work.is_completed()
        with pytest.raises(dist.DistBackendError, match=r"rank 2 .* Timed out after 200 ms"):
            work.wait(timedelta(seconds=0.2))
    assert time.monotonic() - begin < PATIENCE / 2


def run_an_abort() -> None:
    """Whoever waits on another host hears of it, instead of a death."""
    group = dist.new_group()
    if dist.get_rank() == 0:
        _torch_internals.cpu_backend(group).abort()
    elif dist.get_rank() == 2:
        with pytest.raises(dist.DistBackendError, match=r"abort\(\) was called on rank 0"):
            dist.recv(torch.empty(1), 0, group)
    dist.barrier()


def run_messages(hosts: str) -> None:
    init_on(hosts)
    run_receives_that_are_given_up()
    run_an_abort()
    run_in_shared_memory()
    run_until_somebody_asks_for_any_source()
    run_while_everybody_sends(dist.new_group())  # in which nobody has asked for any source yet


def run_waiting_for_a_victim(hosts: str) -> str:
    init_on(hosts)
    dist.barrier()
    meet_in_store("begun")
    if dist.get_rank() == 1:
        os._exit(3)
    with pytest.raises(dist.DistBackendError) as error:
        if dist.get_rank() == 0:
            dist.recv(torch.empty(1), 1)
        else:
            dist.barrier()
    return str(error.value)


def test_messages_on_one_host_need_no_wire_and_messages_from_any_source_keep_their_order() -> None:
    values(run_once(3, run_messages, "aab", backend=None))


def test_who_waits_for_a_message_of_a_dead_neighbour_ends_the_group_on_all_hosts() -> None:
    outcomes = run_once(4, run_waiting_for_a_victim, "aabb", backend=None)
    for outcome in (outcomes[0], outcomes[2], outcomes[3]):
        assert outcome.kind == "value", outcome.text
        assert re.search(r"rank 1 on \S+ has died", outcome.value), outcome.value


def run_another_message(hosts: str, count: int, dtype: torch.dtype) -> str:
    """What rank 0 sends second is not what rank 1 expects; rank 2 is in no call meanwhile."""
    init_on(hosts)
    rank, store = dist.get_rank(), dist.distributed_c10d._get_default_store()
    if rank == 2:
        store.wait(["told by 0", "told by 1"], timedelta(seconds=PATIENCE))
        with pytest.raises(dist.DistBackendError) as error:
            dist.barrier()
        return str(error.value)
    if rank == 0:
        dist.send(torch.ones(3), 1, tag=5)
    else:
        dist.recv(torch.ones(3), 0, tag=5)
    with pytest.raises(dist.DistBackendError) as error:
        if rank == 0:
            dist.send(torch.ones(3), 1, tag=5)
        else:
            work = dist.irecv(torch.ones(count, dtype=dtype), 0, tag=5)
            while not work.is_completed():
                time.sleep(0.01)
            work.wait()
    store.set(f"told by {rank}", "")
    return str(error.value)


def run_in_a_circle_of_waits(hosts: str) -> str:
    """Rank 0 waits for rank 1, which waits for rank 2, which calls nothing."""
    init_on(hosts)
    group: Any = dist.new_group()
    dist.barrier(group)
    meet_in_store("connected")
    group.set_timeout(timedelta(seconds=2))
    store = dist.distributed_c10d._get_default_store()
    rank = dist.get_rank()
    if rank == 2:
        store.wait(["told by 0", "told by 1"], timedelta(seconds=PATIENCE))
        return ""
    with pytest.raises(dist.DistBackendError) as error:
        dist.recv(torch.ones(3), rank + 1, group)
    store.set(f"told by {rank}", "")
    return str(error.value)


@pytest.mark.parametrize(("count", "dtype"), [(3, torch.int32), (4, torch.float32)], ids=str)
def test_who_wait_for_each_other_with_different_messages_are_told(count: int, dtype: torch.dtype) -> None:
    """Long before the timeout. Numbers of one dtype are not received as another."""
    sent, expected = "12 bytes of float32", rf"{4 * count} bytes of {str(dtype).removeprefix('torch.')}"
    of_sender = rf"a send to rank 1 on \S+ \({sent}, tag 5\).*: rank 1 on \S+ expects {expected} instead"
    of_receiver = rf"a receive from rank 0 on \S+ \({expected}, tag 5\).*: rank 0 on \S+ sends {sent} instead"
    for text in values(run_once(3, run_another_message, "abc", count, dtype, backend=None)):
        assert re.search(of_sender, text) or re.search(of_receiver, text), text


def test_a_receive_that_times_out_names_whom_its_peer_waits_for() -> None:
    for text in values(run_once(3, run_in_a_circle_of_waits, "abc", backend=None))[:2]:
        # Rank 1 may have been the first to lose patience.
        assert re.search(r"(no answer from:|in a receive from) rank 2 on \S+", text), text
